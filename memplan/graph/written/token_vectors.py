"""A short vector of each token, as retrievers compare them (``ColPaliForRetrieval`` of transformers)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.products import linear
from memplan.model.spec import ModelSpec


def token_vectors(t: Tape, model: ModelSpec, x: Tensor) -> Tensor:
    """A linear layer, each row over its length (which autocast adds up in fp32), nothing for padding; their sum.

    The class has no loss of its own.
    """
    width = model.head.vector_size
    made = linear(t, x, "embedding_proj_layer", model.hidden_size, width, bias=True)
    rows = made.numel // width
    length = t.tensor(rows, made.dtype if t.autocast is None else DType.FP32)
    t.record(
        OperationKind.VECTOR_NORM, (made,), (length,), saves=(made, length),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    unit = t.tensor(made.numel, length.dtype)
    t.record(
        OperationKind.DIV, (made, length), (unit,), saves=(made, length),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    mask = t.tensor(rows, DType.INT64)
    t.record(OperationKind.ARANGE, (), (mask,))
    out = t.tensor(unit.numel, unit.dtype)
    t.record(
        OperationKind.MUL, (unit, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.give_out(out)
    loss = t.tensor(1, out.dtype)
    t.record(OperationKind.SUM, (out,), (loss,), gradients=(Gradient.FRESH,))
    return loss
