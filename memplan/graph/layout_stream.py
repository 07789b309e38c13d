"""LiLT: a narrow stream of boxes beside the text's, through every layer.

Both streams' scores are added up for either's softmax; all else of a layer is BERT's, twice
(transformers 5.23, models/lilt/modeling_lilt.py). A batch without boxes has zeros in their place.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, merged_heads
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding, embedding_lookup
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, LayoutStreamSpec, LayoutTablesSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole

SIDES = 6
"""Left, upper, right and lower edges, height and width."""


def layout_embeddings(
    t: Tape, spec: EmbeddingSpec, layout: LayoutTablesSpec, context: StackContext
) -> None:
    """Rows of the boxes' tables, joined and projected; positions of their own; norm and dropout."""
    tokens = context.batch * context.seq_len
    share = spec.embedding_size // SIDES
    boxes = t.tensor(4 * tokens, DType.INT64)
    t.record(OperationKind.ZEROS, (), (boxes,))
    t.hold(boxes)
    across, down, height, width = (
        t.parameter(
            f"layout.{name}_position_embeddings.weight", layout.num_rows, share,
            role=WeightRole.TABLE,
        )
        for name in "xyhw"
    )  # fmt: skip
    corners = t.view(boxes, tokens)
    rows = [embedding_lookup(t, table, tokens, corners) for table in (across, down, across, down)]
    for table in (height, width):
        extent = t.tensor(tokens, DType.INT64)
        t.record(OperationKind.SUB, (boxes,), (extent,))
        rows.append(embedding_lookup(t, table, tokens, extent))
    joined = t.concatenate(*rows)
    size = SIDES * share
    narrow = linear(t, joined, "layout.box_linear_embeddings", size, layout.width, bias=True)
    t.touch(joined)
    name = "layout.box_position_embeddings"
    positions = embedding(t, name, layout.num_positions, layout.width, tokens)
    summed = t.add(narrow, positions)
    normed = norm(t, summed, layout.norm, "layout.embed_norm", layout.width)
    out = dropout(t, normed, layout.dropout, module="layout.dropout")
    t.touch(normed, *rows, positions)
    # A variable of the model's holds it until all layers are done.
    t.hold(out)
    context.beside = out


def layout_layer(
    t: Tape, x: Tensor, layer: LayerSpec, layout: LayoutStreamSpec, context: StackContext
) -> Tensor:
    """Attention of both streams, then either's sum, norm, network, sum and norm."""
    assert context.beside is not None
    assert isinstance(layer.attention, AttentionSpec)
    assert isinstance(layer.feed_forward, FeedForwardSpec)
    boxes, hidden, width = context.beside, context.hidden_size, layout.width
    t.block = LayerBlock.ATTENTION
    attended, beside = _attention(t, x, boxes, layer.attention, layout, context)
    x = _summed(t, attended, x, "", "self_attn", layer, hidden)
    boxes = _summed(t, beside, boxes, "layout.", "self_attn", layer, width)
    t.block = LayerBlock.NETWORK
    t.linger(x)
    t.linger(boxes)
    out = _network(t, x, layer.feed_forward, "", layer, hidden)
    following = _network(t, boxes, layout.network, "layout.", layer, width)
    context.hand_on(t, following)
    return out


def _summed(
    t: Tape, made: Tensor, x: Tensor, stream: str, part: str, layer: LayerSpec, width: int
) -> Tensor:
    """``LiltSelfOutput``."""
    projected = linear(
        t, made, f"{stream}{part}.o_proj", width, width, bias=True,
        role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    return _residual(t, projected, x, f"{stream}{part}", layer, width)


def _network(
    t: Tape, x: Tensor, spec: FeedForwardSpec, stream: str, layer: LayerSpec, width: int
) -> Tensor:
    """``LiltIntermediate`` and ``LiltOutput``."""
    fed = feed_forward(t, x, spec, width, f"{stream}mlp")
    return _residual(t, fed, x, f"{stream}final", layer, width)


def _residual(t: Tape, made: Tensor, x: Tensor, name: str, layer: LayerSpec, width: int) -> Tensor:
    dropped = dropout(t, made, layer.dropout, module=f"{name}.dropout")
    out = norm(t, t.add(dropped, x), layer.norm, f"{name}_layer_norm", width)
    t.touch(dropped)
    return out


def _attention(
    t: Tape,
    x: Tensor,
    boxes: Tensor,
    spec: AttentionSpec,
    layout: LayoutStreamSpec,
    context: StackContext,
) -> tuple[Tensor, Tensor]:
    """``LiltSelfAttention``: what the text attends to, and what the boxes do."""
    beside = replace(spec, head_dim=layout.head_dim)
    lengths = (context.batch, context.seq_len, context.seq_len)
    shapes = Shape(*lengths, spec), Shape(*lengths, beside)
    narrow, hidden = layout.width, context.hidden_size

    def projected(given: Tensor, name: str, width: int) -> Tensor:
        return linear(t, given, f"{name}_proj", width, width, bias=True)

    values, keys, queries = (projected(boxes, f"layout.self_attn.{each}", narrow) for each in "vkq")
    query, key, value = (projected(x, f"self_attn.{each}", hidden) for each in "qkv")
    scores = _product(t, query, key, shapes[0])
    alike = _product(t, queries, keys, shapes[1])
    of_text, of_boxes = t.scale(scores, OperationKind.DIV), t.scale(alike, OperationKind.DIV)
    both = t.add(of_text, of_boxes)
    t.touch(scores)
    others = t.add(of_boxes, of_text)
    t.touch(alike)
    seen, named = _seen(t, others, values, shapes[1], context)
    read, held = _seen(t, both, value, shapes[0], context)
    t.touch(values, keys, queries, key, value, query, *held, *named, of_text, of_boxes)
    return read, seen


def _product(t: Tape, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    left, right = merged_heads(t, query, shape), merged_heads(t, key, shape)
    return batched_matmul(t, left, right, shape.scores, shape.spec.head_dim)


def _seen(
    t: Tape, scores: Tensor, value: Tensor, shape: Shape, context: StackContext
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The values that the masked scores weight, and what variables hold beside them."""
    assert context.mask is not None
    masked = t.add(scores, context.mask)
    weights = dropout(t, softmax(t, masked), shape.spec.dropout)
    product = batched_matmul(t, weights, merged_heads(t, value, shape), shape.outputs, shape.keys)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    return out, (masked, weights)
