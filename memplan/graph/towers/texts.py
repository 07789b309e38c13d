"""How a tower reads token ids."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.texts import DecodedTokensBody


def decoded_tokens(t: Tape, body: DecodedTokensBody, flow: Flow) -> Tensor:
    """``PPFormulaNetTextModel``: its variable holds what the table gave until it returns."""
    length = min(t.options.seq_len, body.num_positions)
    flow.items = t.options.batch_size
    rows = flow.items * length
    ids = from_batch(t, rows, DType.INT64)
    flow.labels = from_batch(t, rows, DType.INT64)
    tokens = t.scale(embedding_lookup(t, t.parameter(f"{body.tokens}.weight"), rows, ids))
    t.hold(tokens)
    flow.named.append(tokens)
    flow.hold_mask(t, length)
    numbers = t.tensor(length, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    places = embedding_lookup(t, t.parameter(f"{body.positions}.weight"), length, numbers)
    normed = layer_norm(t, t.add(tokens, places), body.norm, body.size)
    return dropout(t, normed, body.dropout)
