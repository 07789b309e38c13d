"""Attention of classes that fold the heads into the batch before anything else: LED's decoder.

Queries, scaled at once, keys and values are copied to lie head by head, and the masked scores go through a
softmax in their own dtype.
"""

from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax


def folded_attention(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weighted values, token by token, and the copies that the module's variables hold."""
    folded = tuple(_folded(t, each, shape) for each in (query, key, value))
    query, key, value = folded
    scores = batched_matmul(t, query, key, shape.scores, shape.spec.head_dim)
    if mask is not None:
        scores = t.add(scores, mask)
    probabilities = softmax(t, scores)
    t.touch(scores)
    weights = dropout(t, probabilities, shape.spec.dropout)
    product = batched_matmul(t, weights, value, shape.outputs, shape.keys)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    return out, (*folded, probabilities, weights)


def _folded(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``reshape(batch * heads, rows, columns)``: a copy unless there is one sequence."""
    out = t.slice(x, x.numel) if shape.batch == 1 else t.scale(x, OperationKind.CLONE)
    out.by_head = True
    return out
