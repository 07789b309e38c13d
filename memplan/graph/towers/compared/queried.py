"""Trained queries that read a tower's tokens: ``AriaProjector``, ``InstructBlipQFormerModel`` of transformers."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.attention import AttentionSpec
from memplan.model.towers.compared.queried import (
    InstructionBody,
    MaskedQueriesBody,
    QueriedBody,
    QueriesOnlyBody,
    QueryLayerBody,
)


def write_queried(
    t: Tape, x: Tensor, body: QueriedBody, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """The operations of any body of ``memplan.model.towers.compared.queried``."""
    match body:
        case MaskedQueriesBody():
            return _masked_queries(t, x, body, flow)
        case InstructionBody():
            return with_instruction(t, body, flow)
        case QueryLayerBody():
            return _query_layer(t, x, body, flow, given[body.memory])
        case QueriesOnlyBody():
            return t.contiguous(t.slice(x, flow.items * body.num_queries * body.size))


def with_instruction(t: Tape, body: InstructionBody, flow: Flow) -> Tensor:
    """``InstructBlipQFormerEmbeddings``: the instruction is what of a sequence is no picture."""
    pictures = t.options.images_per_sample * body.num_queries
    length = max(1, min(t.options.seq_len - pictures, body.num_positions))
    rows = flow.items * length
    t.hold_buffer(allocated_bytes(body.num_positions, DType.INT64))
    ids, numbers = from_batch(t, rows, DType.INT64), t.tensor(length, DType.INT64)
    t.record(OperationKind.CLONE, (), (numbers,))
    found = embedding_lookup(t, t.parameter("word_embeddings.weight"), rows, ids)
    places = embedding_lookup(t, t.parameter("position_embeddings.weight"), length, numbers)
    words = t.add(found, places)
    t.touch(places)
    both = t.concatenate(spread(t, body.queries, flow.items, 0), words)
    return dropout(t, layer_norm(t, both, "layernorm", body.size), body.dropout)


def _query_layer(t: Tape, x: Tensor, body: QueryLayerBody, flow: Flow, memory: Tensor) -> Tensor:
    """``InstructBlipQFormerLayer``."""
    size = body.size
    attended = _bert_attention(t, x, x, "attention", body, flow, size)
    first = flow.items * body.num_queries * size
    queries, words = t.slice(attended, first), t.slice(attended, attended.numel - first)
    if body.source:
        seen = _bert_attention(
            t, queries, memory, "crossattention", body, flow, body.source, apart=True
        )
        fed = _bert_network(t, seen, "mlp_query", body)
    else:
        fed = _bert_network(t, queries, "mlp_query", body, apart=True)
    spoken = _bert_network(t, words, "mlp_text", body, apart=True)
    out = t.concatenate(fed, spoken)
    t.touch(attended, fed, spoken)
    return out


def _bert_attention(
    t: Tape,
    x: Tensor,
    read: Tensor,
    name: str,
    body: QueryLayerBody,
    flow: Flow,
    source: int,
    *,
    apart: bool = False,
) -> Tensor:
    """Projections, scores, a sum and its norm; ``apart`` is what is asked from a part of a tensor."""
    size, heads = body.size, body.num_heads
    asked = _apart(t, x) if apart else x
    query = linear(t, asked, f"{name}.q_proj", size, size, bias=True)
    key = linear(t, read, f"{name}.k_proj", source, size, bias=True)
    value = linear(t, read, f"{name}.v_proj", source, size, bias=True)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False,
        dropout=body.attention_dropout, fp32_softmax=False, names_weights=False,
    )  # fmt: skip
    queries, keys = x.numel // size // flow.items, read.numel // source // flow.items
    out = attend(t, query, key, value, Shape(flow.items, queries, keys, spec), None)
    made = dropout(t, linear(t, out, f"{name}.o_proj", size, size, bias=True), body.dropout)
    t.touch(query, key, value)
    return layer_norm(t, t.add(made, x), f"{name}.output.norm", size)


def _bert_network(
    t: Tape, x: Tensor, name: str, body: QueryLayerBody, *, apart: bool = False
) -> Tensor:
    size, inner = body.size, body.inner_size
    raised = linear(t, _apart(t, x) if apart else x, f"{name}.fc1", size, inner, bias=True)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    made = dropout(t, linear(t, active, f"{name}.fc2", inner, size, bias=True), body.dropout)
    return layer_norm(t, t.add(made, x), f"{name}.norm", size)


def _apart(t: Tape, x: Tensor) -> Tensor:
    """A part of a tensor, copied into rows for a matrix."""
    return t.contiguous(x if t.autocast is None else t.cast(x, t.autocast))


def _masked_queries(t: Tape, x: Tensor, body: MaskedQueriesBody, flow: Flow) -> Tensor:
    size, module = body.size, body.module
    count = dict(body.counts).get(flow.patches)
    if count is None:
        known = ", ".join(str(patches) for patches, _ in body.counts)
        msg = (
            f"image_size: a picture of {flow.patches} patches has no number of queries in "
            f"projector_patch_to_query_dict, which knows {known}; choose a size of as many patches"
        )
        raise SetupError(msg)
    first = t.slice(t.parameter(body.query), count * size)
    asked = t.tensor(flow.items * count * size, first.dtype)
    t.record(OperationKind.REPEAT, (first,), (asked,), gradients=(Gradient.FRESH,))
    normed = layer_norm(t, asked, f"{module}.layer_norm", size)
    query = linear(t, normed, f"{module}.q_proj", size, size, bias=False)
    read = layer_norm(t, x, f"{module}.layer_norm_kv", size)
    key = linear(t, read, f"{module}.k_proj", size, size, bias=False)
    value = linear(t, read, f"{module}.v_proj", size, size, bias=False)
    given = whole_attention(t, (query, key, value), f"{module}.multihead_attn", body, flow)
    t.touch(asked, normed, read)
    rows = t.contiguous(given if t.autocast is None else t.cast(given, t.autocast))
    bias = t.parameter(f"{module}.linear.bias")
    made = t.add(
        matmul_weight(t, rows, t.parameter(f"{module}.linear.weight")), t.cast_weight(bias)
    )
    out = layer_norm(t, made, body.norm, size)
    raised = linear(t, out, f"{body.network}.fc1", size, body.outputs, bias=False)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    return linear(t, active, f"{body.network}.fc2", body.outputs, body.outputs, bias=False)


def whole_attention(
    t: Tape, parts: tuple[Tensor, Tensor, Tensor], name: str, body: MaskedQueriesBody, flow: Flow
) -> Tensor:
    """``torch.nn.MultiheadAttention`` that is given a mask and asked for its weights.

    Sequences lie across, so that each third of the one weight reads a copy.
    """
    query, key, value = parts
    size, heads = body.size, body.num_heads
    pairs = query.numel // size * (key.numel // size // flow.items) * heads
    mask = t.tensor(pairs, query.dtype)
    t.record(OperationKind.MASK, (), (mask,))
    weights = t.split(t.parameter(f"{name}.in_proj_weight"), *(size * size,) * 3)
    biases = t.split(t.parameter(f"{name}.in_proj_bias"), *(size,) * 3)
    made = [_across(t, *each, size) for each in zip(parts, weights, biases, strict=True)]
    scaled = t.scale(made[0])
    added = mask if t.autocast is None else t.cast(mask, t.autocast)
    scores = t.tensor(pairs, scaled.dtype)
    t.record(
        OperationKind.BADDBMM, (added, scaled, made[1]), (scores,), saves=(scaled, made[1]),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
        flops=2 * pairs * (size // heads),
    )  # fmt: skip
    shares = softmax(t, scores)
    t.touch(scores, made[0])
    seen = batched_matmul(t, shares, made[2], query.numel, pairs * size // heads // query.numel)
    joined = t.contiguous(seen)
    t.touch(seen, mask, query, key, value)
    out = linear(t, joined, f"{name}.out_proj", size, size, bias=True)
    t.touch(joined, shares)
    return out


def _across(t: Tape, x: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
    """A linear layer on what lies across, with a part of a weight, and its bias added."""
    if t.autocast is not None:
        x, weight, bias = (t.cast(each, t.autocast) for each in (x, weight, bias))
    rows = t.contiguous(x)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.MATMUL, (rows, weight), (out,), saves=(rows, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * x.numel * size,
    )  # fmt: skip
    return t.add(out, bias)
