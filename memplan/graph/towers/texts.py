"""How a tower reads token ids."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.elementwise import add_in_place, dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.texts import DecodedTokensBody, TypedTokensBody


def typed_tokens(t: Tape, body: TypedTokensBody, flow: Flow) -> Tensor:
    """``BertEmbeddings``: numbers of positions and types are buffers of the longest text."""
    flow.items = t.options.batch_size
    length = min(t.options.seq_len, body.num_positions)
    rows = flow.items * length
    ids = from_batch(t, rows, DType.INT64)
    flow.mask = None
    for _ in range(2):
        t.hold_buffer(allocated_bytes(body.num_positions, DType.INT64))
    words = embedding_lookup(t, t.parameter("word_embeddings.weight"), rows, ids)
    kinds = embedding_lookup(t, t.parameter("token_type_embeddings.weight"), rows)
    total = t.add(words, kinds)
    table = t.parameter("position_embeddings.weight")
    at = embedding_lookup(t, table, length)
    # A sum under the same name lets the one before it go.
    total = add_in_place(t, total, at) if body.sums_in_place else t.add(total, at)
    out = dropout(t, layer_norm(t, total, "embed_norm", body.size), body.dropout)
    t.touch(words, kinds, at)
    # The model's own variable holds it until the layers are through (BertModel.forward).
    t.hold(out)
    flow.shared.append(out)
    return out


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
