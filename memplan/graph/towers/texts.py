"""A text tower's tokens (``CLIPTextEmbeddings``), and the mask that eager attention is given."""

from memplan.dtypes import DType
from memplan.graph.operations import embedding_lookup
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.texts import TokensBody


def text_tokens(t: Tape, body: TokensBody, flow: Flow) -> Tensor:
    """Rows of two tables, added."""
    options = t.options
    flow.items = options.batch_size
    length = min(options.seq_len, body.num_positions)
    ids = from_batch(t, flow.items * length, DType.INT64)
    flow.ids = ids
    t.hold_buffer(allocated_bytes(body.num_positions, DType.INT64))
    x = embedding_lookup(t, t.parameter(f"{body.tokens}.weight"), flow.items * length, ids)
    positions = embedding_lookup(t, t.parameter(f"{body.positions}.weight"), length)
    out = t.add(x, positions)
    t.touch(x, positions)
    flow.mask = None
    if body.causal:
        flow.hold_mask(t, length)
    return out
