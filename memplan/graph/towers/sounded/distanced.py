"""What SpeechT5 computes (transformers 5.23, ``SpeechT5Attention`` and what stands before and behind it)."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import as_heads, batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.distanced import DistancedBody, DistancedLayerBody, PairVectorsBody, Place


def write_distanced(t: Tape, x: Tensor, body: DistancedBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case PairVectorsBody():
            return _pair_vectors(t, x, body, flow)
        case DistancedLayerBody():
            return _layer(t, x, body, flow)


def _pair_vectors(t: Tape, x: Tensor, body: PairVectorsBody, flow: Flow) -> Tensor:
    """``SpeechT5RelativePositionalEncoding``: distances, cut at both ends, as numbers of rows."""
    flow.length = x.numel // body.size // flow.items
    out = dropout(t, layer_norm(t, x, body.norm, body.size), body.dropout)
    pairs = flow.length**2
    distances, cut = t.tensor(pairs, DType.INT64), t.tensor(pairs, DType.INT64)
    t.record(OperationKind.SUB, (), (distances,))
    compared = allocated_bytes(pairs, DType.BOOL) + allocated_bytes(pairs, DType.INT64)
    t.record(OperationKind.WHERE, (distances,), (cut,), forward_scratch_bytes=compared)
    numbers = t.shift(cut)
    vectors = embedding_lookup(t, t.parameter(f"{body.table}.weight"), pairs, numbers)
    t.touch(cut)
    flow.share(t, vectors)
    flow.tables = vectors, vectors
    return out


def _layer(t: Tape, x: Tensor, body: DistancedLayerBody, flow: Flow) -> Tensor:
    size = body.size
    if not body.memory:
        attended = _attention(t, x, x, "self_attn", body, flow, vectors=True)
        out = layer_norm(t, _sum(t, x, attended, body), "self_attn_layer_norm", size)
    else:
        attended = _attention(t, x, x, "self_attn", body, flow, mask=flow.mask)
        out = layer_norm(t, _sum(t, x, attended, body), "self_attn_layer_norm", size)
        assert flow.memory is not None
        attended = _attention(t, out, flow.memory, "cross_attn", body, flow)
        out = layer_norm(t, _sum(t, out, attended, body), "cross_attn_layer_norm", size)
    raised = linear(t, out, "mlp.up_proj", size, body.inner_size, bias=True)
    middle = activation(t, raised, body.activation)
    t.touch(raised)
    middle = dropout(t, middle, body.activation_dropout)
    fed = linear(t, middle, "mlp.down_proj", body.inner_size, size, bias=True)
    fed = dropout(t, fed, body.dropout)
    added = t.add(out, fed)
    t.touch(out)
    return layer_norm(t, added, "final_layer_norm", size)


def _sum(t: Tape, x: Tensor, attended: Tensor, body: DistancedLayerBody) -> Tensor:
    dropped = dropout(t, attended, body.dropout)
    out = t.add(x, dropped)
    t.touch(x, dropped)
    return out


def _attention(
    t: Tape,
    x: Tensor,
    source: Tensor,
    name: str,
    body: DistancedLayerBody,
    flow: Flow,
    *,
    vectors: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Scores of contents and distances, one added to the other where it lies."""
    t.block = LayerBlock.ATTENTION if source is x else LayerBlock.CROSS_ATTENTION
    size, heads = body.size, body.num_heads
    head_dim = size // heads
    queries, keys = flow.tokens(x, size), flow.tokens(source, size)
    pairs = flow.items * heads * queries * keys

    def project(read: Tensor, part: str) -> Tensor:
        made = linear(t, read, f"{name}.{part}", size, size, bias=True)
        made = as_heads(t, made, heads)
        if part == "q_proj":
            made = t.scale(made)
        return made

    made = [project(x, "q_proj"), project(source, "k_proj"), project(source, "v_proj")]
    query, key, value = (t.contiguous(each) if flow.items > 1 else each for each in made)
    if t.autocast is not None:
        query, key, value = (t.cast(each, t.autocast) for each in (query, key, value))
    scores = batched_matmul(t, query, key, pairs, head_dim)
    held: list[Tensor] = []
    if vectors and flow.tables is not None:
        rows = query if flow.items > 1 else t.contiguous(query)
        beside = _distances(t, rows, flow.tables[0], pairs, head_dim, body.place)
        summed = t.view(scores, scores.numel)
        t.record(
            OperationKind.ADD_IN_PLACE, (scores, beside), (summed,),
            gradients=(Gradient.ALIAS, Gradient.ALIAS),
        )  # fmt: skip
        scores = summed
        held.append(beside)
    if mask is not None:
        scores = t.add(scores, mask)
    weights = softmax(t, scores)
    t.touch(scores)
    dropped = dropout(t, weights, body.attention_dropout)
    cast = dropped if t.autocast is None else t.cast(dropped, t.autocast)
    product = batched_matmul(t, cast, value, x.numel, keys)
    out = t.contiguous(product)
    t.touch(product)
    result = linear(
        t, out, f"{name}.o_proj", size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT
    )
    t.touch(query, key, value, weights, dropped, out, *held)
    t.block = LayerBlock.NETWORK
    return result


def _distances(
    t: Tape, query: Tensor, vectors: Tensor, pairs: int, head_dim: int, place: Place
) -> Tensor:
    """Queries times the vectors of their distances.

    The vectors' gradient comes as a view, so that the engine adds that of another layer to it in a new
    tensor; at the first layer, the last to hold the vectors, these make room for it.
    """
    rows = vectors
    if place is Place.MIDDLE or (place is Place.FIRST and t.autocast is not None):
        rows = t.view(vectors, vectors.numel)
        t.record(
            OperationKind.VIEW, (vectors,), (rows,), gradients=(Gradient.ALIAS,),
            backward_scratch_bytes=vectors.storage.num_bytes,
        )  # fmt: skip
    read = rows if t.autocast is None else t.cast(rows, t.autocast)
    return batched_matmul(t, query, read, pairs, head_dim)
