"""Perceiver's layers, as its classes write them out."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.attention.head_layout import as_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.towers.gridded.grids import by_rows, own_scores, scores_shape
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.latents import (
    LatentsBody,
    PlacedTokensBody,
    QueriesBody,
    ReadingBody,
    SpellingBody,
)


def placed_tokens(t: Tape, body: PlacedTokensBody, flow: Flow) -> Tensor:
    """``PerceiverTextPreprocessor``: both sums are held until the model returns."""
    if t.options.seq_len not in (1, body.length):
        msg = f"seq_len: {t.options.seq_len}: this model's class spells {body.length} tokens, no fewer and no more"
        raise SetupError(msg)
    rows = flow.items * body.length
    ids = from_batch(t, rows, DType.INT64)
    flow.table = t.parameter(f"{body.tokens}.weight")
    found = embedding_lookup(t, flow.table, rows, ids)
    numbers = t.tensor(body.length, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    places = embedding_lookup(t, t.parameter(f"{body.positions}.weight"), body.length, numbers)
    out = t.add(found, places)
    t.hold(found)
    flow.named.append(found)
    return out


def write_latents(t: Tape, x: Tensor, body: LatentsBody, flow: Flow) -> Tensor:
    """The operations of one part that reads."""
    match body:
        case QueriesBody():
            flow.memory = x
            t.hold(x)
            flow.named.append(x)
            return spread(t, body.weight, flow.items, 0)
        case ReadingBody():
            return _read(t, x, body, flow)
        case SpellingBody():
            return _spelled(t, x, body, flow)
        case PlacedTokensBody():
            return placed_tokens(t, body, flow)


def _read(t: Tape, x: Tensor, body: ReadingBody, flow: Flow) -> Tensor:
    """``PerceiverAttention``."""
    name, items = body.module, flow.items
    normed = layer_norm(t, x, f"{name}.queries_norm", body.size)
    read, width = normed, body.size
    if body.source:
        assert flow.memory is not None
        read, width = layer_norm(t, flow.memory, f"{name}.source_norm", body.source), body.source

    def heads(source: Tensor, part: str, inputs: int, outputs: int) -> Tensor:
        made = linear(t, source, f"{name}.{part}", inputs, outputs, bias=True)
        return as_heads(t, made, body.num_heads)

    query = heads(normed, "q_proj", body.size, body.key_width)
    key = heads(read, "k_proj", width, body.key_width)
    value = heads(read, "v_proj", width, body.value_width)
    counts = normed.numel // body.size // items, read.numel // width // items
    sizes = body.key_width // body.num_heads, body.value_width // body.num_heads
    shape = scores_shape(items, *counts, body.num_heads, *sizes)
    rows = by_rows(t, own_scores(t, query, key, value, shape, body.dropout), shape)
    t.touch(query, key, value, normed, read)
    out = linear(t, rows, f"{name}.o_proj", body.value_width, body.outputs, bias=True)
    if body.added:
        out = t.add(out, x)
    t.touch(rows)
    return out


def _spelled(t: Tape, x: Tensor, body: SpellingBody, flow: Flow) -> Tensor:
    """``PerceiverEmbeddingDecoder``, and the loss of all positions."""
    assert flow.table is not None
    product = matmul_weight(t, x, flow.table, module=body.table)
    logits = t.add(product, t.parameter(body.bias))
    t.touch(product)
    t.returned.append(logits)
    t.give_out(logits)
    labels = from_batch(t, logits.numel // body.rows, DType.INT64)
    return cross_entropy(t, logits, labels)
