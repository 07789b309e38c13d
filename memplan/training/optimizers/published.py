"""Optimizers that come with their papers or in collections; read from source, not run."""

from collections.abc import Sequence
from math import isqrt

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import (
    Made,
    OptimizerRow,
    Place,
    Script,
    Stepped,
    TensorRole,
)
from memplan.training.optimizers.torch_rows import a_copy_of_each, moments


def one_average(script: Script, tensor: Stepped) -> None:
    """Lion's ``exp_avg``."""
    script.state("exp_avg", tensor.numel, tensor.dtype)


def lion(script: Script, tensor: Stepped) -> None:
    """``update = exp_avg.clone().mul_(beta1).add(grad)``: the clone goes when the sum is there."""
    script.let("clone", tensor.numel, tensor.dtype)
    script.let("update", tensor.numel, tensor.dtype)
    script.drop("clone", "update")


def sophia(script: Script, tensor: Stepped) -> None:
    """``ratio = (exp_avg.abs() / (rho * bs * hess + 1e-15)).clamp(None, 1)``, then ``exp_avg.sign()``."""
    script.let("abs", tensor.numel, tensor.dtype)
    script.let("product", tensor.numel, tensor.dtype)
    script.let("sum", tensor.numel, tensor.dtype)
    script.drop("product")
    script.let("quotient", tensor.numel, tensor.dtype)
    script.drop("abs", "sum")
    script.let("ratio", tensor.numel, tensor.dtype)
    script.drop("quotient")
    script.let("sign", tensor.numel, tensor.dtype)
    script.drop("sign")


def shampoo_states(script: Script, tensor: Stepped) -> None:
    """Two square matrices for each dimension, whatever its size: ``torch.eye(dim).to(grad.dtype)`` and zeros."""
    for number, size in enumerate(tensor.shape):
        if tensor.dtype is not DType.FP32:
            script.let("eye", size * size, DType.FP32)
        script.state(f"pre_cond_{number}", size * size, tensor.dtype)
        script.drop("eye")
        script.state(f"inv_pre_cond_{number}", size * size, tensor.dtype)


def shampoo(script: Script, tensor: Stepped) -> None:
    """The gradient dimension by dimension: turned, and multiplied by the root; what it comes to is kept
    as ``momentum_buffer``.

    ``grad_t`` holds the last dimension's turned copy until the next tensor's is bound.
    """
    last = len(tensor.shape) - 1
    for number, size in enumerate(tensor.shape):
        if 0 < number < last:  # of others moving a dimension to the front is a view
            script.let("unfolded_grad", tensor.numel, tensor.dtype)
        else:
            script.drop("unfolded_grad")
        if number:
            script.let("turned", tensor.numel, tensor.dtype)
            script.drop("grad")
            script.rename("turned", "grad_t")
        else:
            script.drop("grad_t")
        _inverse_root(script, size * size, tensor.dtype)
        if number < last:
            script.let("grad", tensor.numel, tensor.dtype)
    script.renew("momentum_buffer", tensor.numel, tensor.dtype)


def _inverse_root(script: Script, numel: int, dtype: DType) -> None:
    """``compute_power_svd``: ``u, s, vh = svd(matrix.to(fp32))``, which copies what it is given; ``(u * s) @ vh``.

    What cuSOLVER takes for itself in it is left out.
    """
    is_cast = dtype is not DType.FP32
    if is_cast:
        script.let("matrix", numel, DType.FP32)
    for name, count in (("u", numel), ("vh", numel), ("s", isqrt(numel)), ("overwritten", numel)):
        script.let(name, count, DType.FP32)
    script.drop("overwritten", "matrix")
    script.let("scaled", numel, DType.FP32)
    script.let("root", numel, DType.FP32)
    script.drop("scaled")
    if is_cast:
        script.let("inverse", numel, dtype)
        script.drop("root")
    script.drop("u", "s", "vh", "root", "inverse")


def _preconditioned(script: Script, tensor: Stepped) -> list[int]:
    """The dimensions of a matrix that SOAP keeps a square matrix for."""
    if not tensor.is_factored:
        return []
    limit = script.number("max_precondition_dim")
    return [size for size in tensor.shape if size <= limit]


def soap(script: Script, tensor: Stepped) -> None:
    """``SOAP.step``: Adam's moments in the eigenbases ``Q`` of the averages ``GG``.

    The first step only makes the states.
    """
    sizes = _preconditioned(script, tensor)
    if script.first:
        moments(script, tensor)
        _eigenbases(script, tensor, sizes)
        return
    _project(script, tensor, sizes, "grad_projected")
    script.let("square", tensor.numel, tensor.dtype)
    script.drop("square")
    script.let("de_nom", tensor.numel, tensor.dtype)
    _project(script, tensor, sizes, "exp_avg_projected")
    script.let("ratio", tensor.numel, tensor.dtype)
    _project(script, tensor, sizes, "norm_grad", read="ratio")
    for size in sizes:
        script.let("outer_product", size * size, tensor.dtype)
    script.drop("outer_product")


def _project(
    script: Script, tensor: Stepped, sizes: Sequence[int], name: str, *, read: str = ""
) -> None:
    """``SOAP.project``: ``grad = torch.tensordot(grad, mat)`` for each matrix; with none what it is given, permuted."""
    if not sizes:
        script.rename(read, name) if read else script.drop(name)
    for number in range(len(sizes)):
        script.let("product", tensor.numel, tensor.dtype)
        if read and not number:
            script.drop(read)
    if sizes:
        script.rename("product", name)


def _eigenbases(script: Script, tensor: Stepped, sizes: Sequence[int]) -> None:
    """``init_pre_conditioner``, then ``eigh(m + 1e-30 * torch.eye(...))`` of each average, flipped.

    What cuSOLVER takes for itself in it is left out.
    """
    for number, size in enumerate(sizes):
        script.state(f"GG{number}", size * size, tensor.dtype)
    for size in sizes:
        script.let("outer_product", size * size, tensor.dtype)
    for number, size in enumerate(sizes):
        script.let("eye", size * size, tensor.dtype)
        script.let("scaled", size * size, tensor.dtype)
        script.drop("eye")
        script.let("sum", size * size, tensor.dtype)
        script.drop("scaled")
        script.let("values that came", size, tensor.dtype)
        script.let("q", size * size, tensor.dtype)
        script.drop("sum")
        script.rename("values that came", "eigenvalues")
        script.state(f"Q{number}", size * size, tensor.dtype)
        script.drop("q")
    script.drop("eigenvalues", "outer_product")


def adam_mini_states(script: Script, tensor: Stepped) -> None:
    """``m`` whole; a second moment for each row, each head of queries and keys, or each norm."""
    script.state("m", tensor.numel, tensor.dtype)
    if not tensor.is_factored:
        script.let("square", tensor.numel, tensor.dtype)
        script.let("sum", 1, tensor.dtype)
        script.drop("square")
    script.state("vmean", _num_means(script, tensor), tensor.dtype)
    script.drop("sum")


def _num_means(script: Script, tensor: Stepped) -> int:
    if not tensor.is_factored:
        return 1
    rows = tensor.num_rows
    if tensor.role is TensorRole.QUERY_KEY:
        rows = max(1, rows // script.number("head_dim"))
    return rows


def adam_mini(script: Script, tensor: Stepped) -> None:
    """``torch.mean(grad * grad)``; ``vmean.sqrt() / c`` and ``1 / c / h``; then ``m * stepsize``, and ``-update``."""
    means = _num_means(script, tensor)
    script.let("square", tensor.numel, tensor.dtype)
    _bind(script, "tmp_lr", means, tensor.dtype, lets_go="square")
    if not tensor.is_factored:
        _bind(script, "tmp_lr", 1, tensor.dtype)  # over the number of elements
    for name, before in (("h", "root"), ("stepsize", "reciprocal")):
        script.let(before, means, tensor.dtype)
        _bind(script, name, means, tensor.dtype, lets_go=before)
    script.let("update", tensor.numel, tensor.dtype)
    script.let("negative", tensor.numel, tensor.dtype)
    script.drop("negative")


def _bind(script: Script, name: str, numel: int, dtype: DType, *, lets_go: str = "") -> None:
    """A value made of one that goes before the name's old value does."""
    script.let("made", numel, dtype)
    script.drop(*filter(None, [lets_go]))
    script.rename("made", name)


def stable_adamw_states(script: Script, tensor: Stepped) -> None:
    """Adam's moments, scalars, and a compensation where the parameter is 16-bit."""
    moments(script, tensor)
    script.state("eps_sq", 1, tensor.dtype)
    is_compensated = script.flag("kahan_sum") and tensor.dtype.is_half
    numel = tensor.numel if is_compensated else 1
    script.state("kahan_comp", numel, tensor.dtype if is_compensated else DType.UINT8)
    script.state("mean_square", 1, DType.FP32)


def averaged_states(script: Script, tensor: Stepped) -> None:
    """Schedule-free AdamW's ``z``, a copy of the parameter, and ``exp_avg_sq``."""
    script.state("z", tensor.numel, tensor.dtype)
    script.state("exp_avg_sq", tensor.numel, tensor.dtype)


def averaged_weights(script: Script, tensor: Stepped) -> None:
    """Schedule-free SGD's ``z``."""
    script.state("z", tensor.numel, tensor.dtype)


def nothing_at_all(script: Script, tensors: Sequence[Stepped]) -> None:
    """Lists that are changed in place."""
    del script, tensors


def grokadamw(script: Script, tensor: Stepped) -> None:
    """States come from the CPU for each update, the moments together, and go back."""
    if script.first:
        for name in ("exp_avg", "exp_avg_sq", "grok_ema"):
            script.state(name, tensor.numel, tensor.dtype, place=Place.HOST)
    moved = ("exp_avg", "exp_avg_sq")
    for name in moved:
        script.let(f"{name} that came", tensor.numel, tensor.dtype)
    for name in moved:
        script.rename(f"{name} that came", name)
    script.let("grok_ema", tensor.numel, tensor.dtype)
    script.let("product", tensor.numel, tensor.dtype)
    script.let("sum", tensor.numel, tensor.dtype)
    script.drop("product")
    script.rename("sum", "grok_grad")
    script.let("denom", tensor.numel, tensor.dtype)
    script.drop("denom")


_SCHEDULE_FREE = "schedulefree 1.4.1, schedulefree/{}_schedulefree.py"

ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.LION: OptimizerRow(
        init=one_average, update=lion, made=Made.EACH, words="1 x {dtype}",
        source="lion_pytorch 0.2.5, lion_pytorch/lion_pytorch.py",
    ),
    Optimizer.LION_FUSED: OptimizerRow(
        init=one_average, words="1 x {dtype}", zero_offload=True,
        source="deepspeed 0.19.8, deepspeed/ops/lion/fused_lion.py",
    ),
    Optimizer.LAMB: OptimizerRow(
        init=moments, made=Made.EACH,
        source="deepspeed 0.19.8, deepspeed/ops/lamb/fused_lamb.py",
    ),
    Optimizer.SOPHIA: OptimizerRow(
        init=moments, update=sophia, source="Liuhong99/Sophia, sophia.py, _single_tensor_sophiag",
    ),
    Optimizer.SHAMPOO: OptimizerRow(
        init=shampoo_states, update=shampoo, needs_matrices=True,
        words="1 x {dtype} and two square matrices for each dimension",
        source="pytorch_optimizer 4.1, pytorch_optimizer/optimizer/shampoo.py",
    ),
    Optimizer.SOAP: OptimizerRow(
        update=soap, made=Made.EACH, needs_matrices=True, options={"max_precondition_dim": 10_000},
        words="2 x {dtype} and two square matrices for each dimension up to max_precondition_dim",
        source="pytorch_optimizer 4.1, pytorch_optimizer/optimizer/soap.py",
    ),
    Optimizer.ADAM_MINI: OptimizerRow(
        init=adam_mini_states, update=adam_mini, made=Made.EACH, options={"head_dim": 128},
        needs_matrices=True, words="1 x {dtype} and a second moment for each row or head",
        source="adam_mini 1.1.1, adam_mini/adam_mini.py",
    ),
    Optimizer.STABLE_ADAMW: OptimizerRow(
        init=stable_adamw_states, options={"kahan_sum": True},
        words="2 x {dtype}, and a third where that has 16 bits",
        source="torch-optimi 0.3.3, optimi/stableadamw.py, its Triton form",
    ),
    Optimizer.SCHEDULE_FREE_ADAMW: OptimizerRow(
        init=averaged_states, update_all=a_copy_of_each, source=_SCHEDULE_FREE.format("adamw"),
    ),
    Optimizer.SCHEDULE_FREE_RADAM: OptimizerRow(
        init=averaged_states, update_all=a_copy_of_each, source=_SCHEDULE_FREE.format("radam"),
    ),
    Optimizer.SCHEDULE_FREE_SGD: OptimizerRow(
        init=averaged_weights, update_all=nothing_at_all, words="1 x {dtype}",
        source=_SCHEDULE_FREE.format("sgd"),
    ),
    Optimizer.GROKADAMW: OptimizerRow(
        update=grokadamw, made=Made.EACH, words="3 x {dtype} in CPU RAM",
        source="grokadamw 0.1.2, grokadamw/grokadamw.py",
    ),
}  # fmt: skip
