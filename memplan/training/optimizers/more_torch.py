"""The other optimizers of torch 2.13 (torch/optim), in the form that is taken on a GPU."""

from collections.abc import Sequence
from math import prod

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import (
    Made,
    OptimizerRow,
    Script,
    Stepped,
    TensorRole,
)
from memplan.training.optimizers.torch_rows import (
    ADAM_SOURCE,
    a_copy_of_each,
    adamw_loop,
    counted_moments,
    moments,
)

NEWTON_SCHULZ_STEPS = 5


def sum_of_squares(script: Script, tensor: Stepped) -> None:
    """Adagrad's ``sum``."""
    script.state("sum", tensor.numel, tensor.dtype)


def two_copies_of_each(script: Script, tensors: Sequence[Stepped]) -> None:
    """Adagrad's ``std`` and ``numerator``."""
    a_copy_of_each(script, tensors)
    for number, tensor in enumerate(tensors):
        script.let(f"numerator {number}", tensor.numel, tensor.dtype)


def rmsprop_states(script: Script, tensor: Stepped) -> None:
    """``square_avg``; a buffer with momentum, ``grad_avg`` where it is centered."""
    script.state("square_avg", tensor.numel, tensor.dtype)
    if script.options["momentum"]:
        script.state("momentum_buffer", tensor.numel, tensor.dtype)
    if script.flag("centered"):
        script.state("grad_avg", tensor.numel, tensor.dtype)


def steps_by_muon(script: Script, tensor: Stepped) -> bool:
    """Matrices of linear layers; the output matrix where ``head`` says so."""
    matrices = (2, 3) if tensor.whole else (2,)
    if len(tensor.shape) not in matrices or tensor.role is TensorRole.EMBEDDING:
        return False
    return tensor.role is not TensorRole.HEAD or script.text("head") == "muon"


def muon_states(script: Script, tensor: Stepped) -> None:
    """One momentum buffer, or fused AdamW's states."""
    if steps_by_muon(script, tensor):
        script.state("momentum_buffer", tensor.numel, tensor.dtype)
    else:
        counted_moments(script, tensor)


def muon_update(script: Script, tensor: Stepped) -> None:
    """``_single_tensor_muon`` and its Newton-Schulz iteration, which is in bf16.

    ``update`` is the caller's, ``ortho`` the callee's: a bf16 update is the same tensor in both.
    """
    if not steps_by_muon(script, tensor):
        return
    if tensor.whole:
        _muon_of_parts(script, tensor)
        return
    if script.flag("nesterov"):
        script.let("update", tensor.numel, tensor.dtype)
    else:
        script.drop("update")
    if tensor.dtype is not DType.BF16:
        script.let("ortho", tensor.numel, DType.BF16)
    side = min(tensor.shape)
    for _ in range(NEWTON_SCHULZ_STEPS):
        script.let("gram_matrix", side * side, DType.BF16)
        script.let("gram_update", side * side, DType.BF16)
        script.let("ortho", tensor.numel, DType.BF16)
    script.drop("gram_matrix", "gram_update", "update")
    script.rename("ortho", "update")


def _muon_of_parts(script: Script, tensor: Stepped) -> None:
    """dion's ``muon_update_batch_async``: as many matrices as there are ranks at once, of which each rank is
    handed one whole, orthogonalizes it and hands the parts back; all in bf16."""
    matrix = tensor.whole[-2:]
    numel = prod(tensor.whole)
    script.let("update", numel, DType.BF16)
    script.let("parts", numel, DType.BF16)
    script.let("matrix", numel, DType.BF16)
    copies, side = numel // prod(matrix), min(matrix)
    for _ in range(NEWTON_SCHULZ_STEPS):
        script.let("gram_matrix", copies * side * side, DType.BF16)
        script.let("gram_update", copies * side * side, DType.BF16)
        script.let("ortho", numel, DType.BF16)
    script.drop("gram_matrix", "gram_update", "matrix")
    script.let("parts", numel, DType.BF16)
    script.drop("parts", "ortho", "update")


def muon_group(script: Script, tensor: Stepped) -> int:
    """Muon's own step comes first."""
    return 0 if steps_by_muon(script, tensor) else 1


ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.ADAMW_LOOP: OptimizerRow(
        init=moments, update=adamw_loop, options={"amsgrad": False},
        source=f"{ADAM_SOURCE}, _single_tensor_adam",
    ),
    Optimizer.ADAGRAD: OptimizerRow(
        init=sum_of_squares, update_all=two_copies_of_each, made=Made.CONSTRUCTION,
        words="1 x {dtype}", zero_offload=True,
        source="torch 2.13, torch/optim/adagrad.py, _multi_tensor_adagrad",
    ),
    Optimizer.RMSPROP: OptimizerRow(
        init=rmsprop_states, update_all=a_copy_of_each, words="1 x {dtype} and what is asked for",
        options={"momentum": 0.0, "centered": False},
        source="torch 2.13, torch/optim/rmsprop.py, _multi_tensor_rmsprop",
    ),
    Optimizer.NADAM: OptimizerRow(
        init=moments, update_all=a_copy_of_each,
        source="torch 2.13, torch/optim/nadam.py, _multi_tensor_nadam",
    ),
    Optimizer.RADAM: OptimizerRow(
        init=moments, update_all=a_copy_of_each,
        source="torch 2.13, torch/optim/radam.py, _multi_tensor_radam",
    ),
    Optimizer.MUON: OptimizerRow(
        init=muon_states, update=muon_update, group=muon_group, needs_matrices=True,
        words="1 x {dtype} of linear layers' matrices, fused AdamW's 2 x {dtype} of the rest,",
        options={"nesterov": True, "head": "adamw"},
        source="torch 2.13, torch/optim/_muon.py, with AdamW beside it for what is no hidden matrix; under "
        "FSDP2 dion's (dion/muon.py, muon_update_batch_async)",
    ),
}  # fmt: skip
"""What is a list of copies goes in one piece, as torch's lists do."""
