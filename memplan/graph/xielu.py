"""xIELU, an activation with two trained numbers, in the steps of its Python form.

``XIELUActivation._xielu_python`` of transformers 5.23 (arXiv:2411.13010), which runs wherever the
``xielu`` CUDA package is not installed.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes


def xielu(t: Tape, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """``x > 0 ? a x x + b x : (expm1(min(x, e)) - x) c + b x``, with a and c trained numbers' softplus."""
    positive, negative = _softplus(t, positive), _softplus(t, negative)
    above = t.tensor(x.numel, DType.BOOL)
    t.record(OperationKind.GT, (x,), (above,), gradients=(Gradient.NONE,))
    upper = t.add(t.mul(t.mul(positive, x), x), t.scale(x))
    lower = t.add(t.mul(_below(t, x), t.shift(negative)), t.scale(x))
    out = t.tensor(x.numel, upper.dtype)
    t.record(
        OperationKind.WHERE, (above, upper, lower), (out,), saves=(above,),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return out


def _softplus(t: Tape, number: Tensor) -> Tensor:
    """Of a trained number; autocast runs it in fp32 too, and what it is multiplied with follows."""
    if t.autocast is not None:
        number = t.cast(number, DType.FP32)
    return t.elementwise(OperationKind.SOFTPLUS, number)


def _below(t: Tape, x: Tensor) -> Tensor:
    """``expm1(min(x, eps)) - x``; autocast runs expm1 in fp32."""
    low, lower = t.tensor(x.numel, x.dtype), allocated_bytes(x.numel, DType.BOOL)
    t.record(
        OperationKind.MINIMUM, (x,), (low,), saves=(x,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(low.storage.num_bytes, lower, RESULT, lower),
    )  # fmt: skip
    argument = low if t.autocast is None else t.cast(low, DType.FP32)
    curve = t.tensor(x.numel, argument.dtype)
    t.record(
        OperationKind.EXPM1, (argument,), (curve,), saves=(curve,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=curve.storage.num_bytes,
    )  # fmt: skip
    t.touch(low)
    out = t.tensor(x.numel, curve.dtype)
    negated = Gradient.FRESH if x.dtype is out.dtype else out.storage.num_bytes
    t.record(OperationKind.SUB, (curve, x), (out,), gradients=(Gradient.ALIAS, negated))
    return out
