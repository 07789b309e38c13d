"""Linear layers on rows that lie in another order than they are read in."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import add_in_place
from memplan.model.parameters import WeightRole


def copied_linear(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """``torch.nn.Linear``: a copy, its product, the bias added to that."""
    weight = t.matrix(f"{name}.weight", out_features, in_features, role=role)
    addend = t.cast_weight(t.bias(f"{name}.bias", weight)) if bias else None
    factor = t.cast_weight(weight)
    cast = x if t.autocast is None else t.cast(x, t.autocast)
    rows = t.contiguous(cast)
    numel = x.numel // in_features * out_features
    product = t.tensor(numel, rows.dtype)
    t.record(
        OperationKind.LINEAR, (rows, factor), (product,), saves=(factor, rows),
        gradients=(Gradient.VIEW, Gradient.VIEW), flops=2 * x.numel * out_features,
    )  # fmt: skip
    if cast is not x:
        t.touch(cast)
    if addend is None:
        return product
    if not t.decomposed:
        return add_in_place(t, product, addend)
    # Of a tensor that only seems to be one, out of place (aten/src/ATen/native/Linear.cpp).
    out = t.tensor(numel, rows.dtype)
    t.record(
        OperationKind.ADD, (product, addend), (out,), gradients=(Gradient.ALIAS, Gradient.SUMMED)
    )
    return out
