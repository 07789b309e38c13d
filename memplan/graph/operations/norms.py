"""Layer norms and RMS norms: what each code base's implementation really runs."""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient, Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.reduction import Multiprocessors, column_sum_scratch
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import WeightRole
from memplan.training.choices_of_kernels.kernels import NormKernel
from memplan.units import ceil_div, round_up


def norm(
    t: Tape,
    x: Tensor,
    spec: NormSpec,
    name: str,
    width: int,
    *,
    groups: int = 1,
    strided: bool = False,
) -> Tensor:
    """Normalize the last ``width`` elements as ``spec`` and the chosen kernel do.

    ``groups`` is how many different weights stand side by side in a row. What is ``strided`` does not lie in
    rows. The caller's variable holds ``x`` until the norm returns. A rank that has a share of the sequences has one of the weight's
    gradient too.
    """
    declared = len(t.segment.parameters)
    out = _norm(t, x, spec, name, width, groups, strided=strided)
    group = t.options.tensor_parallel
    if group is not None and group.sequence:
        for weight in t.segment.parameters[declared:]:
            weight.added_up = weight.is_distributed = True
    t.touch(x)
    return out


def _norm(
    t: Tape, x: Tensor, spec: NormSpec, name: str, width: int, groups: int, *, strided: bool
) -> Tensor:
    kind = spec.kind
    if kind is NormKind.LAYER and not spec.weight:
        return native_layer_norm(t, x, width, ())
    if kind is NormKind.LAYER and groups > 1:
        return layer_norm_per_head(t, x, name, width, groups)
    if kind is NormKind.LAYER:
        return layer_norm(t, x, name, width, bias=spec.bias, strided=strided)
    if not spec.weight:
        return t.cast(_normalized(t, x, width, kind)[0], x.dtype)
    weight = t.parameter(f"{name}.weight", width, role=WeightRole.NORM)
    if t.kernels.norm is not NormKernel.EAGER:
        return rms_norm_fused(t, x, weight)
    if kind is NormKind.RMS:
        return rms_norm(t, x, weight)
    if kind is NormKind.RMS_GEMMA:
        return rms_norm_gemma(t, x, weight)
    if kind is NormKind.RMS_POWER:
        return rms_norm_power(t, x, weight)
    return rms_norm_upcast(t, x, weight)


def norm_weightless(t: Tape, x: Tensor, width: int) -> Tensor:
    """``torch.nn.RMSNorm`` without a weight: one kernel on CUDA, in fp32 under autocast, which keeps x and a number per row."""
    if t.autocast is not None:
        x = t.cast(x, DType.FP32)
    if t.decomposed:
        return t.cast(_normalized(t, x, width)[0], x.dtype)
    out, statistic = t.tensor(x.numel, x.dtype), t.tensor(x.numel // width, DType.FP32)
    t.record(
        OperationKind.RMS_NORM, (x,), (out, statistic), saves=(x, statistic),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return out


def layer_norm(
    t: Tape,
    x: Tensor,
    name: str,
    width: int,
    *,
    bias: bool = True,
    strided: bool = False,
) -> Tensor:
    """``torch.nn.LayerNorm``: keeps its input and two fp32 statistics per row."""
    weight = t.parameter(f"{name}.weight", width, role=WeightRole.NORM)
    inputs: tuple[Tensor, ...] = (weight,)
    if bias:
        inputs += (t.parameter(f"{name}.bias", width, role=WeightRole.NORM),)
    return native_layer_norm(t, x, width, inputs, strided=strided)


def native_layer_norm(
    t: Tape,
    x: Tensor,
    width: int,
    weights: tuple[Tensor, ...],
    *,
    strided: bool = False,
) -> Tensor:
    """``torch.nn.functional.layer_norm``: in fp32 under autocast, which casts the last of its arguments first.

    Its copies of half weights are no others' (only those to a lower format are cached), and backward keeps them. What is
    ``strided`` does not lie in rows: the kernels copy it first (``expect_contiguous``).
    """
    full = x
    if t.autocast is not None:
        weights = tuple(t.cast(each, DType.FP32) for each in reversed(weights))[::-1]
        full = t.cast(x, DType.FP32)
    out = layer_norm_kernel(t, full, width, weights, strided=strided)
    t.touch(x)
    return out


def layer_norm_kernel(
    t: Tape,
    x: Tensor,
    width: int,
    weights: tuple[Tensor, ...],
    *,
    strided: bool = False,
) -> Tensor:
    """The kernel itself, in the format of ``x``: it keeps its input and two numbers a row."""
    rows = x.numel // width
    copied = (strided or x.by_channel) and not t.decomposed
    size = allocated_bytes(x.numel, x.dtype)
    scratch: tuple[int, ...] = (size, RESULT) if copied else ()
    backward = beside_partial_sums(t, scratch, x, weights)
    out = t.tensor(x.numel, x.dtype)
    out.is_flat = x.is_flat
    mean, deviation = t.tensor(rows, DType.FP32), t.tensor(rows, DType.FP32)
    t.record(
        OperationKind.LAYER_NORM, (x, *weights), (out, mean, deviation), saves=(x, mean, deviation, *weights),
        gradients=(Gradient.FRESH,) * (1 + len(weights)),
        forward_scratch_bytes=scratch, backward_scratch_bytes=backward,
    )  # fmt: skip
    return out


def copy_gradient_first(t: Tape, norm: Operation) -> None:
    """Note that what arrives in backward does not lie in rows, and is copied."""
    x, *weights = norm.inputs
    results = sum(each.requires_grad for each in norm.inputs)
    size = allocated_bytes(x.numel, x.dtype)
    scratch = (*norm.forward_scratch[:1], *(RESULT,) * results, size)
    norm.backward_scratch = beside_partial_sums(t, scratch, x, tuple(weights))


MANY_ROWS = 64 * 1024
"""Rows above which the weights' gradients of narrow ones are summed in two passes."""
ROWS_SUMMED = 32
"""Rows that a block of the first pass adds up, and columns that it has."""
MOST_PARTIAL_SUMS = 1 << 20
"""Sums of the first pass at most (asked of torch 2.13 for widths from 64 to 1,727)."""


def beside_partial_sums(
    t: Tape, scratch: tuple[int, ...], x: Tensor, weights: tuple[Tensor, ...]
) -> tuple[int, ...]:
    """A norm's backward scratch with what its weights' gradients take of many narrow rows: sums of 32 rows or more,
    in the weight's format, which one sum after another then adds up.

    (torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``)
    """
    width = max((each.numel for each in weights), default=0)
    trained = [each for each in weights if each.requires_grad]
    if not trained or t.decomposed or x.numel <= MANY_ROWS * width:
        return scratch
    if width // ROWS_SUMMED >= t.num_multiprocessors // 2:
        return scratch
    results = len(trained) + x.requires_grad
    steps = [*scratch, *(RESULT,) * (results - scratch.count(RESULT))]
    rows = ceil_div(x.numel // width, ROWS_SUMMED)
    rows = min(rows, MOST_PARTIAL_SUMS // round_up(width, ROWS_SUMMED))
    sizes = [allocated_bytes(rows * width, each.dtype) for each in trained]
    steps += sizes
    for size in sizes:
        steps += beside_sum(steps, width, rows, size, t)
    return tuple(steps)


def beside_sum(
    before: Sequence[int], columns: int, rows: int, num_bytes: int, t: Tape
) -> list[int]:
    """What a sum over rows comes and goes with, ``before`` which so many steps stand."""
    device = Multiprocessors(t.num_multiprocessors, t.options.threads_per_multiprocessor)
    steps: list[int] = []
    for launch in column_sum_scratch(columns, rows, num_bytes, device):
        begin = len(before) + len(steps)
        steps += [*launch, *(~(begin + number) for number in reversed(range(len(launch))))]
    return steps


def layer_norm_per_head(t: Tape, x: Tensor, name: str, width: int, heads: int) -> Tensor:
    """StableLM's: heads are split, normalized one by one without a bias, and joined again."""
    size = x.numel // heads
    parts = [
        layer_norm(t, part, f"{name}.norms.{index}", width, bias=False)
        for index, part in enumerate(t.split(x, *(size,) * heads))
    ]
    out = t.concatenate(*parts)
    out.by_head = True
    t.touch(*parts)
    return out


def _reciprocal_root(t: Tape, variance: Tensor) -> Tensor:
    shifted = t.shift(variance)
    return t.elementwise(OperationKind.RSQRT, shifted)


def rms_norm(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Llama's RMSNorm: an fp32 copy, normalized, cast back, times the weight."""
    normalized, variance = _normalized(t, x, weight.numel)
    out = t.mul(weight, t.cast(normalized, x.dtype))
    t.touch(normalized, variance)
    return out


def _normalized(
    t: Tape, x: Tensor, width: int, kind: NormKind = NormKind.RMS
) -> tuple[Tensor, Tensor]:
    """An fp32 copy over the root of its mean square, and that mean."""
    full = t.cast(x, DType.FP32)
    variance = t.mean(t.square(full), width)
    if kind is NormKind.RMS_POWER:
        return t.mul(full, t.square(t.shift(variance))), variance
    return t.mul(full, _reciprocal_root(t, variance)), variance


def rms_norm_power(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Gemma 4's: all of it in fp32, the root as a power, times the weight's copy, then cast back."""
    normalized, _ = _normalized(t, x, weight.numel, NormKind.RMS_POWER)
    return t.cast(t.mul(normalized, t.cast(weight, DType.FP32)), x.dtype)


def rms_norm_gemma(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Gemma's: all of it in fp32, times one plus the weight, then cast back."""
    normalized, _ = _normalized(t, x, weight.numel)
    product = t.mul(normalized, t.shift(t.cast(weight, DType.FP32)))
    return t.cast(product, x.dtype)


def rms_norm_upcast(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """OLMo 2's: the weight's product is in fp32 too; cast back last."""
    normalized, variance = _normalized(t, x, weight.numel)
    out = t.cast(t.mul(weight, normalized), x.dtype)
    t.touch(normalized, variance)
    return out


def rms_norm_fused(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """One kernel: keeps its input and an fp32 statistic per row.

    Liger's copies into rows what does not lie so, and in backward has a row of fp32 sums for each
    multiprocessor; it makes the gradient over the one it is given, unless it was told not to
    (liger_kernel 0.8.5, ops/rms_norm.py, ``rms_norm_backward``).
    """
    kernel = t.kernels.norm
    liger = kernel is not NormKernel.FUSED
    given = x
    if liger and x.by_head:
        given = t.tensor(x.numel, x.dtype)
        t.record(OperationKind.CONTIGUOUS, (x,), (given,), gradients=(Gradient.ALIAS,))
    out = t.tensor(x.numel, x.dtype)
    statistic = t.tensor(x.numel // weight.numel, DType.FP32)
    sums: tuple[int, ...] = () if liger else beside_partial_sums(t, (), x, (weight,))
    if liger and not t.decomposed and weight.requires_grad:
        size = allocated_bytes(t.num_multiprocessors * weight.numel, DType.FP32)
        sums = (size, RESULT)
    gradient = Gradient.FRESH
    if liger:
        is_over = kernel is NormKernel.LIGER and not given.by_head
        gradient = Gradient.SEEN if is_over else Gradient.VIEW
    t.record(
        OperationKind.RMS_NORM, (given, weight), (out, statistic), saves=(given, statistic),
        gradients=(gradient, Gradient.FRESH),
        backward_scratch_bytes=sums, in_python=liger,
    )  # fmt: skip
    return out
