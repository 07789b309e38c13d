"""GaLore, Q-GaLore and APOLLO: gradients of chosen matrices are projected to a few rows or columns.

States are of the projected gradient, which is as long as the matrix's long side and ``rank`` wide, and
there is a projector of the short side. ``target_modules`` chooses linear layers' matrices: parts of their
names, or ``all-linear``; everything else is stepped as the plain optimizer would. The SVD that makes a
projector comes with the first step and again after every ``update_proj_gap``; cuSOLVER's own workspace is
not counted.
"""

import re

from memplan.dtypes import DType
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.bitsandbytes import SOURCE as BNB_SOURCE
from memplan.training.optimizers.bitsandbytes import states_8bit
from memplan.training.optimizers.factored import factored_moment, fp32_of_half, mean_of_squares
from memplan.training.optimizers.script import (
    Made,
    OptimizerRow,
    OptionValue,
    Script,
    Stepped,
    TensorRole,
)
from memplan.units import ceil_div

_PLAIN_8BIT = states_8bit(2, paged=False)


def is_targeted(script: Script, tensor: Stepped) -> bool:
    """Whether a tensor is projected.

    >>> options = (("target_modules", "attn,mlp"),)
    >>> tensor = Stepped((8, 8), DType.BF16, TensorRole.LINEAR, "self_attn.q_proj")
    >>> is_targeted(Script(options, first=False), tensor)
    True
    """
    if tensor.role not in (TensorRole.LINEAR, TensorRole.QUERY_KEY, TensorRole.HEAD):
        return False
    return len(tensor.shape) == 2 and is_named(script, tensor)


def is_named(script: Script, tensor: Stepped) -> bool:
    """Whether the targets name its module."""
    targets = script.text("target_modules")
    if targets.replace("_", "-") == "all-linear":
        return True
    return any(_matches(each.strip(), tensor.module) for each in targets.split(",") if each.strip())


def _matches(target: str, module: str) -> bool:
    """transformers' ``check_target_module_exists``: part of a name, or a pattern of all of it."""
    if target in module:
        return True
    try:
        return re.fullmatch(target, module) is not None
    except re.error:
        return False


def targets_last(script: Script, tensor: Stepped) -> int:
    """What is not projected stands in the first group of parameters."""
    return 1 if is_targeted(script, tensor) else 0


def projected(script: Script, tensor: Stepped) -> Stepped:
    """The projected gradient: ``std`` projects the shorter side away."""
    rows, columns = tensor.shape
    rank = min(script.number("rank"), rows, columns)
    shape = (rows, rank) if rows >= columns else (rank, columns)
    return Stepped(shape, tensor.dtype)


def make_projector(script: Script, tensor: Stepped, dtype: DType) -> None:
    """``get_orthogonal_matrix``: U, S and Vh in fp32, of a copy that ``torch.linalg.svd`` makes.

    From an fp32 gradient the projector is a view of all of U or Vh; from a half one a cast of its part.
    Q-GaLore's is bytes with a scale and a zero point for each group, made of such a cast.
    """
    rows, columns = tensor.shape
    rank, short = min(script.number("rank"), rows, columns), min(rows, columns)
    is_right = rows >= columns
    is_half = dtype is not DType.FP32
    bits = script.options.get("quant_n_bit")
    is_view = not is_half and not bits
    if is_half:
        script.let("matrix", tensor.numel, DType.FP32)
    if not is_view or is_right:
        script.let("U", rows * short, DType.FP32)
    else:
        script.state("projector.ortho_matrix", rows * short, DType.FP32)
    if not is_view or not is_right:
        script.let("Vh", short * columns, DType.FP32)
    else:
        script.state("projector.ortho_matrix", short * columns, DType.FP32)
    script.let("S", short, DType.FP32)
    script.let("copy", tensor.numel, DType.FP32)
    script.drop("copy")
    script.let("diagonal", rank * rank, DType.FP32)
    script.let("scaled", (rows if is_right else columns) * rank, DType.FP32)
    script.drop("diagonal")
    numel = rank * (columns if is_right else rows)
    if bits:
        groups = ceil_div(numel, script.number("quant_group_size"))
        script.let("cast", numel, dtype)
        script.state("projector.ortho_matrix", numel, DType.UINT8)
        script.state("projector.ortho_matrix_scales", groups, dtype)
        script.state("projector.ortho_matrix_zeros", groups, dtype)
        script.drop("cast")
    elif is_half:
        script.state("projector.ortho_matrix", numel, dtype)
    script.drop("matrix", "U", "S", "Vh", "scaled")


def random_projector(script: Script, tensor: Stepped) -> None:
    """APOLLO's ``stable_randn(...) / sqrt(rank)``, in fp32, then cast."""
    rows, columns = tensor.shape
    numel = script.number("rank") * (min(columns, rows))
    if tensor.dtype is DType.FP32:
        script.let("randn", numel, DType.FP32)
        script.state("projector.ortho_matrix", numel, DType.FP32)
        script.drop("randn")
        return
    script.let("matrix", tensor.numel, DType.FP32)
    script.let("randn", numel, DType.FP32)
    script.let("proj", numel, DType.FP32)
    script.drop("randn")
    script.state("projector.ortho_matrix", numel, tensor.dtype)
    script.drop("matrix", "proj")


def _moments(script: Script, tensor: Stepped) -> None:
    script.state("exp_avg", tensor.numel, tensor.dtype)
    script.state("exp_avg_sq", tensor.numel, tensor.dtype)


def galore_adamw(script: Script, tensor: Stepped) -> None:
    """``galore_torch.AdamW.step`` of one parameter."""
    stepped = tensor
    script.drop("grad")
    if is_targeted(script, tensor):
        stepped = projected(script, tensor)
        if script.first:
            make_projector(script, tensor, tensor.dtype)
        script.let("grad", stepped.numel, tensor.dtype)
    if script.first:
        _moments(script, stepped)
    script.let("denom", stepped.numel, tensor.dtype)
    script.let("norm_grad", stepped.numel, tensor.dtype)
    if stepped is not tensor:
        project_back(script, tensor, "norm_grad")


def project_back(script: Script, tensor: Stepped, name: str, dtype: DType | None = None) -> None:
    """A product with the projector, times the scale."""
    script.let("full_rank_grad", tensor.numel, dtype or tensor.dtype)
    script.let("scaled_back", tensor.numel, dtype or tensor.dtype)
    script.drop("full_rank_grad")
    script.rename("scaled_back", name)


def galore_8bit(script: Script, tensor: Stepped) -> None:
    """``galore_torch.AdamW8bit.step``: the projected gradient takes the gradient's place for good.

    A positional argument of its constructor ends up as ``max_unorm``, so each tensor has a norm too.
    """
    if not is_targeted(script, tensor):
        if script.first:
            _PLAIN_8BIT(script, tensor)
            script.state("unorm_vec", 1, DType.FP32)
        return
    stepped = projected(script, tensor)
    if script.first:
        make_projector(script, tensor, tensor.dtype)
    script.let("grad", stepped.numel, tensor.dtype)
    script.let_weight("saved_data", tensor.numel, tensor.dtype)
    script.let("data", stepped.numel, tensor.dtype)
    # The weight lies in its saved copy from here on.
    script.replace_weight("saved_data")
    script.replace_gradient("grad")
    if script.first:
        _PLAIN_8BIT(script, stepped)
        script.state("unorm_vec", 1, DType.FP32)
    script.let("full_rank_grad", tensor.numel, tensor.dtype)
    script.let("scaled_back", tensor.numel, tensor.dtype)
    script.drop("full_rank_grad", "scaled_back", "data")


def galore_adafactor(script: Script, tensor: Stepped) -> None:
    """``galore_torch.Adafactor.step``: transformers', of a gradient cast to fp32 and projected."""
    fp32_of_half(script, "grad", tensor)
    stepped = Stepped(tensor.shape, DType.FP32)
    if is_targeted(script, tensor):
        if script.first:
            make_projector(script, stepped, DType.FP32)
        stepped = projected(script, stepped)
        script.let("grad", stepped.numel, DType.FP32)
    if script.first:
        if script.flag("beta1"):
            script.state("exp_avg", stepped.numel, DType.FP32)
        factored_moment(script, stepped)
    fp32_of_half(script, "p_data_fp32", tensor)
    if script.first:
        script.state("RMS", 1, DType.FP32)
    mean_of_squares(script, stepped)
    if script.flag("beta1"):
        script.drop("update")
    if is_targeted(script, tensor):
        project_back(script, tensor, "update", DType.FP32)
    script.let("negative", tensor.numel, DType.FP32)
    script.drop("negative")


def apollo_adamw(script: Script, tensor: Stepped) -> None:
    """``apollo_torch.APOLLOAdamW.step``: the gradient itself is scaled, row by row or as a whole."""
    stepped = tensor
    script.drop("grad")
    if is_targeted(script, tensor):
        rows, columns = tensor.shape
        rank = script.number("rank")
        shape = (rows, rank) if rows >= columns else (rank, columns)
        stepped = Stepped(shape, tensor.dtype)
        if script.first and script.text("proj") == "random":
            random_projector(script, tensor)
        elif script.first:
            make_projector(script, tensor, tensor.dtype)
        script.let("grad", stepped.numel, tensor.dtype)
    if script.first:
        _moments(script, stepped)
    script.let("denom", stepped.numel, tensor.dtype)
    script.let("norm_grad", stepped.numel, tensor.dtype)
    if stepped is tensor:
        return
    _scale_of_each(script, tensor)
    script.let("scaled_grad", tensor.numel, tensor.dtype)
    if script.first:
        script.state("scaled_grad", 1, tensor.dtype)
    else:
        script.let("limited", tensor.numel, tensor.dtype)
        script.rename("limited", "scaled_grad")
    # ``norm_grad = scaled_grad``: the low-rank one goes, and that one has two names.
    script.drop("norm_grad")


def _scale_of_each(script: Script, tensor: Stepped) -> None:
    """``torch.norm(norm_grad, dim) / (torch.norm(grad, dim) + 1e-8)`` along the shorter side, or of all."""
    length = 1 if script.text("scale_type") == "tensor" else max(tensor.shape)
    for name in ("norm_of_update", "norm_of_grad", "sum"):
        script.let(name, length, tensor.dtype)
    script.drop("norm_of_grad")
    script.let("ratio", length, tensor.dtype)
    script.drop("norm_of_update", "sum")
    script.rename("ratio", "grad_scaling_factor")


_OPTIONS: dict[str, OptionValue] = {
    "rank": 128, "update_proj_gap": 200, "target_modules": "attn,mlp", "proj_type": "std",
    "scale": 0.25,
}  # fmt: skip
_8BIT: dict[str, OptionValue] = {"min_8bit_size": 4096, "embeddings_32bit": False}
_WORDS = "2 x {dtype} of projected gradients with their projectors, and of all else whole,"

ROWS: dict[Optimizer, OptimizerRow] = {
    Optimizer.GALORE_ADAMW: OptimizerRow(
        update=galore_adamw, made=Made.EACH, group=targets_last, options=_OPTIONS,
        needs_matrices=True, words=_WORDS,
        source="galore_torch 1.0, galore_torch/adamw.py and galore_projector.py",
    ),
    Optimizer.GALORE_ADAMW_8BIT: OptimizerRow(
        update=galore_8bit, made=Made.EACH, group=targets_last,
        options={**_OPTIONS, **_8BIT},
        needs_matrices=True, words=_WORDS.replace("{dtype}", "uint8"),
        source=f"galore_torch 1.0, galore_torch/adamw8bit.py; {BNB_SOURCE}",
    ),
    Optimizer.GALORE_ADAFACTOR: OptimizerRow(
        update=galore_adafactor, made=Made.EACH, group=targets_last,
        options={**_OPTIONS, "beta1": 0.0}, needs_matrices=True,
        words="a row and a column in fp32, of projected gradients with their projectors,",
        source="galore_torch 1.0, galore_torch/adafactor.py",
    ),
    Optimizer.Q_GALORE_ADAMW_8BIT: OptimizerRow(
        update=galore_8bit, made=Made.EACH, group=targets_last,
        options={**_OPTIONS, **_8BIT, "quant_n_bit": 4, "quant_group_size": 256},
        needs_matrices=True, words=_WORDS.replace("{dtype}", "uint8"),
        source="q_galore_torch 1.0, q_galore_torch/q_galore_adamw8bit.py",
    ),
    Optimizer.APOLLO_ADAMW: OptimizerRow(
        update=apollo_adamw, made=Made.EACH, group=targets_last,
        options={**_OPTIONS, "scale": 1.0, "proj": "random", "scale_type": "channel"},
        needs_matrices=True, words=_WORDS, source="apollo_torch 1.0, apollo_torch/apollo.py",
    ),
}  # fmt: skip
