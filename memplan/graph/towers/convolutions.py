"""Convolutions as torch runs them: the input and the weight are kept as the kernel took them."""

from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor


def convolution(
    t: Tape, x: Tensor, module: str, positions: int, *, bias: bool = True
) -> Tensor:
    """``torch.nn.Conv1d``, ``2d`` or ``3d`` whose result has so many ``positions`` over the batch.

    Its sizes are those of the weight that is declared already.
    """
    weight = t.parameter(f"{module}.weight")
    addend = t.parameter(f"{module}.bias") if bias else None
    cast_addend = t.cast_weight(addend) if addend is not None else None
    factor = t.cast_weight(weight)
    given = x if t.autocast is None else t.cast(x, t.autocast)
    out = t.tensor(positions * weight.shape[0], given.dtype)
    inputs: tuple[Tensor, ...] = (given, factor)
    if cast_addend is not None:
        inputs += (cast_addend,)
    t.record(
        OperationKind.CONVOLUTION, inputs, (out,), saves=(given, factor),
        gradients=(Gradient.FRESH,) * len(inputs),
        flops=2 * positions * weight.numel,
    )  # fmt: skip
    t.touch(x)
    return out
