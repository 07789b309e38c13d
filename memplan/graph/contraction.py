"""Products over some of several dimensions, as ``torch.einsum`` makes batched ones of them.

Each operand is turned until its batch dimensions come first, and copied where they do not lie together
in memory then; what comes out is turned back, so that its gradient is copied on its way in
(torch 2.13, aten/src/ATen/native/Linear.cpp, ``sumproduct_pair``).
"""

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Turned:
    """Which of a product's tensors do not lie in memory as a batched product wants them."""

    first: bool = False
    second: bool = False
    result: bool = False
    """Its gradient is copied."""
    swapped: bool = False
    """The second operand becomes the product's left one, and is copied first."""


def contraction(
    t: Tape, first: Tensor, second: Tensor, numel: int, inner: int, turned: Turned
) -> Tensor:
    """``numel`` sums of ``inner`` products each; both operands are kept, as copies where they are made.

    Autocast casts both before anything is copied.
    """
    operands = first, second
    if t.autocast is not None:
        operands = t.cast(first, t.autocast), t.cast(second, t.autocast)
    pairs = [(operands[0], turned.first), (operands[1], turned.second)]
    if turned.swapped:
        pairs.reverse()
    left, right = (t.contiguous(each) if copied else each for each, copied in pairs)
    out = t.tensor(numel, left.dtype)
    saves = [right] if left.requires_grad else []
    if right.requires_grad:
        saves.append(left)
    t.record(
        OperationKind.MATMUL, (left, right), (out,), saves=saves,
        gradients=(Gradient.VIEW, Gradient.VIEW), flops=2 * numel * inner,
    )  # fmt: skip
    t.touch(*operands)
    return turned_back(t, out) if turned.result else out


def turned_back(t: Tape, x: Tensor) -> Tensor:
    """A view in another order of dimensions, whose gradient is copied back into this one's."""
    out = t.view(x, x.numel)
    t.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.FRESH,))
    return out
