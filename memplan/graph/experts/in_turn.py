"""Rows of experts that run one after another, added up where their tokens are."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor


def add_rows(t: Tape, total: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """``index_add_``: keeps rows and places; the rows' gradient is taken out of the sum's."""
    out = t.view(total, total.numel)
    t.record(
        OperationKind.INDEX_ADD_IN_PLACE, (total, rows, tokens), (out,), saves=(tokens, rows),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
