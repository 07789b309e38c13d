"""Convolutions as torch runs them: the input and the weight are kept as the kernel took them."""

from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor


def convolution(t: Tape, x: Tensor, module: str, positions: int, *, bias: bool = True) -> Tensor:
    """``torch.nn.Conv1d``, ``2d`` or ``3d`` whose result has so many ``positions`` over the batch.

    Its sizes are those of the weight that is declared already.
    """
    weight = t.parameter(f"{module}.weight")
    addend = t.parameter(f"{module}.bias") if bias else None
    return convolve(t, x, weight, addend, positions, weight.shape[0])


def convolve(
    t: Tape, x: Tensor, weight: Tensor, bias: Parameter | None, positions: int, channels: int
) -> Tensor:
    """The same with a weight that may have been computed."""
    addend = t.cast_weight(bias) if bias is not None else None
    factor, given = weight, x
    if isinstance(weight, Parameter):
        factor = t.cast_weight(weight)
    if t.autocast is not None:
        factor, given = t.cast(factor, t.autocast), t.cast(x, t.autocast)
    out = t.tensor(positions * channels, given.dtype)
    inputs: tuple[Tensor, ...] = (given, factor)
    if addend is not None:
        inputs += (addend,)
    t.record(
        OperationKind.CONVOLUTION, inputs, (out,), saves=(given, factor),
        gradients=(Gradient.FRESH,) * len(inputs), flops=2 * positions * weight.numel,
    )  # fmt: skip
    t.touch(x)
    return out
