"""A decoder's loss over the tokens that the attention mask lets through, picked by index."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.losses import cross_entropy


def attended_loss(t: Tape, logits: Tensor, columns: int) -> Tensor:
    """``Qwen2AudioForConditionalGeneration``: logits of all tokens but each sequence's last, as they are."""
    rows = max(1, logits.numel // columns - t.options.batch_size)
    picked = picked_rows(t, t.slice(logits, rows * columns), rows)
    labels = t.tensor(rows, DType.INT64)
    t.record(OperationKind.INDEX, (), (labels,))
    loss = cross_entropy(t, picked, labels)
    t.touch(logits, picked)
    return loss


def picked_rows(t: Tape, x: Tensor, rows: int) -> Tensor:
    """Rows where a mask of two dimensions is true: a copy, for which a place and a place in it are kept."""
    places = [t.tensor(rows, DType.INT64) for _ in range(2)]
    for each in places:
        t.record(OperationKind.ARANGE, (), (each,))
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.INDEX, (x, *places), (out,), saves=places,
        gradients=(Gradient.FRESH, Gradient.NONE, Gradient.NONE),
    )  # fmt: skip
    return out
