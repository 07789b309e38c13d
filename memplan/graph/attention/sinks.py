"""Eager attention with sinks: gpt-oss's and MiMo-V2's ``eager_attention_forward``.

A learned number of each head joins its scores as one more key, the largest score is subtracted, and
the softmax runs in the scores' dtype; the extra key is dropped before the values are weighted.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, expand_heads, merged_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax


def sink_attention(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """Scores with the sink among them, softmax, the weighted values."""
    spec = shape.spec
    held = [query, key, value]
    key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
    held += [key, value]
    query, key = merged_heads(t, query, shape), merged_heads(t, key, shape)
    scores = t.scale(batched_matmul(t, query, key, shape.scores, spec.head_dim))
    if mask is not None:
        scores = t.add(scores, mask)
    combined = _with_sink(t, scores, shape) if spec.sinks else scores
    shifted = _less_largest(t, combined, shape)
    probabilities = softmax(t, shifted, in_own_dtype=True)
    weights = t.slice(probabilities, shape.scores) if spec.sinks else probabilities
    weights = t.cast(dropout(t, weights, spec.dropout), value.dtype)
    t.touch(scores)
    value = merged_heads(t, value, shape)
    out = t.scale(batched_matmul(t, weights, value, shape.outputs, shape.keys), OperationKind.CLONE)
    t.touch(*held, shifted, probabilities)
    t.linger(weights)
    return out


def _with_sink(t: Tape, scores: Tensor, shape: Shape) -> Tensor:
    """Each head's sink, expanded to every row, joined to the scores."""
    weight = t.parameter("self_attn.sinks", shape.spec.num_heads)
    sinks = t.view(weight, shape.rows * shape.spec.num_heads)
    t.record(OperationKind.EXPAND, (weight,), (sinks,), gradients=(Gradient.FRESH,))
    return t.concatenate(scores, sinks)


def _less_largest(t: Tape, scores: Tensor, shape: Shape) -> Tensor:
    """``scores - scores.max(dim=-1, keepdim=True).values``: keeps where the largest are."""
    rows = shape.rows * shape.spec.num_heads
    largest, places = t.tensor(rows, scores.dtype), t.tensor(rows, DType.INT64)
    t.record(
        OperationKind.MAX, (scores,), (largest, places), saves=(places,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=scores.storage.num_bytes if t.decomposed else 0,
    )  # fmt: skip
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        OperationKind.SUB,
        (scores, largest),
        (out,),
        gradients=(Gradient.ALIAS, out.storage.num_bytes),
    )
    return out
