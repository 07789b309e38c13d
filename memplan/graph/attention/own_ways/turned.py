"""Linear layers on rows that lie in another order than they are read in (Longformer, FSMT, ProphetNet)."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import add_in_place
from memplan.graph.operations.products import linear
from memplan.model.parameters import WeightRole


def turned_linear(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """``torch.nn.Linear`` of more than one sequence: a copy, its product, the bias added to that."""
    if t.options.batch_size == 1:
        return linear(t, x, name, in_features, out_features, bias=bias, role=role)
    return copied_linear(t, x, name, in_features, out_features, bias=bias, role=role)


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
    """The same of any number of sequences."""
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
