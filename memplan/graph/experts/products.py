"""The grouped product that all experts of a mixture share."""

from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor


def grouped_matmul(
    t: Tape, x: Tensor, weight: Parameter, offsets: Tensor, factor: Tensor
) -> Tensor:
    """``torch.nn.functional.grouped_mm``: autocast does not know it, so it runs in the weight's dtype.

    ``factor`` is the weight itself, or its sum with an adapter's product.
    """
    x = t.cast(x, weight.dtype)
    _, out_features, in_features = weight.shape
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, weight.dtype)
    saves = [offsets]
    if factor.requires_grad:
        saves.append(x)
    if x.requires_grad:
        saves.append(factor)
    t.record(
        OperationKind.GROUPED_MM, (x, factor, offsets), (out,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE),
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out
