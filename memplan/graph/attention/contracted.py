"""Attention whose two products are ``torch.einsum``'s, in the scores' own dtype (ProphetNet).

Queries are scaled before; heads that do not merge with the sequences are copied for each product.
"""

from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.contraction import Turned, contraction
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor


def contracted_attention(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weighted values, token by token, and the weights that the module's variables hold."""
    copied, heads = shape.batch > 1, shape.spec.num_heads
    query, key, value = (as_heads(t, each, heads) for each in (query, key, value))
    turned = Turned(first=copied, second=copied)
    scores = contraction(t, query, key, shape.scores, shape.spec.head_dim, turned)
    probabilities = softmax(t, scores)
    t.touch(scores)
    weights = dropout(t, probabilities, shape.spec.dropout)
    out = contraction(t, weights, value, shape.outputs, shape.keys, Turned(second=copied))
    rows = t.scale(out, OperationKind.CLONE) if copied else t.contiguous(out)
    return rows, (probabilities, weights)
