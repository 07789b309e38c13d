"""What mixes the positions of a picture that stays a grid, as its classes write it out."""

from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import resized
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.gridded.grids import (
    FoldedBody,
    ForgottenBody,
    GridBody,
    ReducedAttentionBody,
    ReturnedBody,
    UnfoldedBody,
)


def write_grid(t: Tape, x: Tensor, body: GridBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case ForgottenBody():
            t.release(flow.named.pop())
            return x
        case ReturnedBody():
            t.hold(x)
            flow.returned.append(x)
            return x
        case UnfoldedBody():
            return _unfolded(t, x, body, flow)
        case FoldedBody():
            return _folded(t, x, body, flow)
        case ReducedAttentionBody():
            return _reduced(t, x, body, flow)


def scores_shape(
    items: int, queries: int, keys: int, num_heads: int, head_dim: int, value: int
) -> Shape:
    """Sizes of scores that a class writes out itself, seen by no causal mask."""
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, value_head_dim=value,
        causal=False,
    )  # fmt: skip
    return Shape(items, queries, keys, spec, heads_split=True)


def own_scores(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    probability: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Scores, softmax in their own dtype, dropout, and the weighted values, head by head in memory."""
    spec = shape.spec
    product = heads_product(t, query, key, shape, shape.scores, spec.head_dim)
    scores = t.scale(product)
    if bias is not None:
        scores = t.add(scores, bias)
    weights = dropout(t, softmax(t, scores), probability)
    out = heads_product(t, weights, value, shape, shape.outputs, shape.keys, first_merged=True)
    t.touch(scores, weights)
    return out


def by_rows(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """Heads side by side again: a copy."""
    out = t.contiguous(x) if shape.batch == 1 else t.scale(x, OperationKind.CLONE)
    t.touch(x)
    return out


def _squares(body: UnfoldedBody | FoldedBody, flow: Flow) -> int:
    """Positions of a picture once its sides hold whole squares."""
    down, across = (-(-side // body.side) * body.side for side in flow.grid)
    return down * across


def _unfolded(t: Tape, x: Tensor, body: UnfoldedBody, flow: Flow) -> Tensor:
    """``MobileViTLayer.unfolding``: resized where squares do not fit, and copied twice."""
    numel = flow.items * _squares(body, flow) * body.size
    if numel != x.numel:
        x = resized(t, x, numel)
    flow.items *= body.side**2
    return t.scale(t.scale(x, OperationKind.CLONE), OperationKind.CLONE)


def _folded(t: Tape, x: Tensor, body: FoldedBody, flow: Flow) -> Tensor:
    flow.items //= body.side**2
    out = t.scale(t.scale(x, OperationKind.CLONE), OperationKind.CLONE)
    numel = flow.items * flow.grid[0] * flow.grid[1] * body.size
    return out if numel == x.numel else resized(t, out, numel)


def _heads(t: Tape, x: Tensor, name: str, body: ReducedAttentionBody) -> Tensor:
    size = body.size
    made = linear(t, x, f"{body.module}.{name}", size, size, bias=body.bias)
    return as_heads(t, made, body.num_heads)


def _attended(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    body: ReducedAttentionBody,
    flow: Flow,
) -> Tensor:
    items, head_dim = flow.items, body.size // body.num_heads
    queries, keys = (each.numel // body.size // items for each in (query, key))
    shape = scores_shape(items, queries, keys, body.num_heads, head_dim, head_dim)
    out = by_rows(t, own_scores(t, query, key, value, shape, body.dropout), shape)
    t.touch(query, key, value)
    result = linear(t, out, f"{body.module}.o_proj", body.size, body.size, bias=True)
    return dropout(t, result, body.output_dropout)


def _reduced(t: Tape, x: Tensor, body: ReducedAttentionBody, flow: Flow) -> Tensor:
    """``PvtEfficientSelfAttention`` and the layer behind it."""
    query = _heads(t, x, "q_proj", body)
    read = x
    if body.reduction > 1:
        height, width = (side // body.reduction for side in flow.grid)
        name = f"{body.module}.sequence_reduction"
        fewer = convolution(t, x, name, flow.items * height * width)
        read = layer_norm(t, fewer, f"{body.module}.layer_norm", body.size)
    key, value = _heads(t, read, "k_proj", body), _heads(t, read, "v_proj", body)
    out = _attended(t, query, key, value, body, flow)
    t.touch(x)
    return out
