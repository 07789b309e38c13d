"""What mixes the positions of a picture that stays a grid, as its classes write it out."""

from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.model.attention import AttentionSpec


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
) -> Tensor:
    """Scores, softmax in their own dtype, dropout, and the weighted values, head by head in memory."""
    spec = shape.spec
    product = heads_product(t, query, key, shape, shape.scores, spec.head_dim)
    scores = t.scale(product)
    weights = dropout(t, softmax(t, scores), probability)
    out = heads_product(t, weights, value, shape, shape.outputs, shape.keys, first_merged=True)
    t.touch(scores, weights)
    return out


def by_rows(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """Heads side by side again: a copy."""
    out = t.contiguous(x) if shape.batch == 1 else t.scale(x, OperationKind.CLONE)
    t.touch(x)
    return out
