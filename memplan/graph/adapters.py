"""What an adapter records on the tape, beside the module that it stands on (peft 0.21.2)."""

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import drop, matmul_weight
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.training.adapters import Lora


def low_rank(
    t: Tape, lora: Lora, dtype: DType, module: str, weight: Parameter, rank: int
) -> tuple[Parameter, tuple[Parameter, ...]]:
    """A, and B with the bias it may have."""
    out_features, in_features = weight.shape[-2:]
    down = t.parameter(
        f"{module}.lora_A.default.weight", rank, in_features, dtype=dtype, of_adapter=True
    )
    name = f"{module}.lora_B.default"
    up = [t.parameter(f"{name}.weight", out_features, rank, dtype=dtype, of_adapter=True)]
    if lora.lora_bias:
        up.append(t.parameter(f"{name}.bias", out_features, dtype=dtype, of_adapter=True))
    return down, tuple(up)


def beside_linear(
    t: Tape, lora: Lora, x: Tensor, out: Tensor, down: Parameter, up: tuple[Parameter, ...]
) -> Tensor:
    """``result + lora_B(lora_A(dropout(x))) * scaling`` (``peft.tuners.lora.layer.Linear``).

    x is cast to the adapter's format first, and the sum back to the result's.
    """
    given = t.cast(x, down.dtype)
    dropped = drop(t, given) if lora.dropout else given
    scaled = t.scale(matmul_weight(t, matmul_weight(t, dropped, down), *up))
    total = t.cast(t.add(out, scaled), out.dtype)
    t.touch(given, x)
    return total


def beside_linear_dora(
    t: Tape,
    lora: Lora,
    x: Tensor,
    out: Tensor,
    weight: Parameter,
    bias: Parameter | None,
    down: Parameter,
    up: tuple[Parameter, ...],
) -> Tensor:
    """``result + ((m - 1) · base + m · lora_B(lora_A(x)) · scaling)``, m a trained magnitude over a norm.

    The norm is that of the weight with the adapter added to it, made anew in every pass by sending an
    identity matrix through the adapter; it hands no gradient on (``peft.tuners.lora.dora``).
    """
    magnitude = t.parameter(
        f"{down.module.removesuffix('.lora_A.default')}.lora_magnitude_vector.default.weight",
        weight.shape[-2], dtype=down.dtype, of_adapter=True,
    )  # fmt: skip
    given = t.cast(x, down.dtype)
    dropped = drop(t, given) if lora.dropout else given
    held = _adapter_weight(t, dropped.dtype, down, up)
    base_weight = t.cast(_detached(weight), dropped.dtype)
    norm = _norm_of_sum(t, base_weight, held[-1], magnitude.numel)
    scale = t.tensor(magnitude.numel, magnitude.dtype)
    t.record(
        OperationKind.DIV, (magnitude, norm), (scale,), saves=(norm,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    scale.by_column = True
    adapted = matmul_weight(t, matmul_weight(t, dropped, down), *up)
    if lora.dropout:
        base = _product(t, dropped, weight, base_weight)
    else:
        base = out if bias is None else t.add(out, bias)
    turned = t.mul(t.shift(scale), base)
    added = t.add(turned, t.scale(t.mul(scale, adapted)))
    t.touch(dropped, *held, base_weight, norm, scale, adapted, base)
    total = t.cast(t.add(out, added), out.dtype)
    t.touch(given, x)
    return total


def _detached(tensor: Tensor) -> Tensor:
    """The same storage, through which no gradient goes."""
    return Tensor(tensor.numel, tensor.dtype, tensor.storage)


def _adapter_weight(
    t: Tape, dtype: DType, down: Parameter, up: tuple[Parameter, ...]
) -> tuple[Tensor, ...]:
    """``B @ A`` in a format, behind what its graph keeps for a gradient that nobody asks for."""
    rank, in_features = down.shape
    eye = t.tensor(in_features * in_features, down.dtype)
    t.record(OperationKind.EYE, (), (eye,))
    factors = [_detached(t.cast_weight(each)) for each in (down, up[0])]
    kept = t.cast(eye, t.autocast) if t.autocast is not None else eye
    low = t.tensor(in_features * rank, kept.dtype)
    flops = 2 * in_features * in_features * rank
    t.record(OperationKind.LINEAR, (kept, factors[0]), (low,), flops=flops)
    high = t.tensor(in_features * up[0].shape[0], kept.dtype)
    t.record(OperationKind.LINEAR, (low, factors[1]), (high,), flops=2 * rank * high.numel)
    t.touch(eye)
    return kept, low, t.cast(high, dtype)


def _norm_of_sum(t: Tape, weight: Tensor, added: Tensor, num_outputs: int) -> Tensor:
    """The norm of each output's weights with the adapter's added to them."""
    total = t.add(weight, t.scale(added))
    full = t.cast(total, DType.FP32) if t.autocast is not None else total
    norm = t.tensor(num_outputs, full.dtype)
    t.record(OperationKind.VECTOR_NORM, (full,), (norm,))
    found = t.cast(norm, total.dtype)
    t.touch(total)
    return found


def _product(t: Tape, x: Tensor, weight: Parameter, factor: Tensor) -> Tensor:
    """``x @ weight.T`` with a copy of a frozen weight, which it keeps for the gradient of x."""
    out_features, in_features = weight.shape[-2:]
    if t.autocast is not None:
        x, factor = t.cast(x, t.autocast), t.cast(factor, t.autocast)
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    t.record(
        OperationKind.LINEAR, (x, factor), (out,), saves=(factor,),
        gradients=(Gradient.VIEW, Gradient.VIEW), flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out
