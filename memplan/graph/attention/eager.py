"""Attention with its scores written out: transformers' eager function, and Megatron's fused one."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, expand_heads, merged_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax


def eager(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """transformers' ``eager_attention_forward``: fp32 softmax, cast back, dropout."""
    spec = shape.spec
    held: tuple[Tensor, ...] = (query, key, value)
    key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
    held += (key, value)
    scores = t.scale(heads_product(t, query, key, shape, shape.scores, spec.head_dim))
    if spec.softcap:
        scores = t.scale(t.elementwise(OperationKind.TANH, t.scale(scores)))
    for added in (bias, mask):
        if added is not None:
            scores = t.add(scores, added)
    weights = softmax(t, scores, dtype=DType.FP32 if spec.fp32_softmax else None)
    if spec.fp32_softmax:
        weights = t.cast(weights, held[0].dtype)
    t.touch(scores)
    weights = dropout(t, weights, spec.dropout)
    out = heads_product(t, weights, value, shape, shape.outputs, shape.keys, first_merged=True)
    out = t.contiguous(out) if shape.batch == 1 else t.scale(out, OperationKind.CLONE)
    t.touch(*held)
    if spec.names_weights:
        t.linger(weights)
    return out


def heads_product(
    t: Tape,
    left: Tensor,
    right: Tensor,
    shape: Shape,
    numel: int,
    inner: int,
    *,
    first_merged: bool = False,
) -> Tensor:
    """``torch.matmul`` of heads: autocast's casts, then its own copies, then the product.

    Both live until it returns, the copies a little shorter.
    """
    cast_right = t.cast(right, t.autocast) if t.autocast is not None else right
    cast_left = t.cast(left, t.autocast) if t.autocast is not None else left
    merged_left = cast_left if first_merged else merged_heads(t, cast_left, shape)
    merged_right = merged_heads(t, cast_right, shape)
    out = batched_matmul(t, merged_left, merged_right, numel, inner)
    for made, source in ((merged_right, cast_right), (merged_left, cast_left)):
        if made is not source:
            t.touch(made)
    for made, source in ((cast_left, left), (cast_right, right)):
        if made is not source:
            t.touch(made)
    return out


def eager_fused(t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """Megatron's core attention: one kernel scales, masks and normalizes the scores."""
    spec = shape.spec
    scores = batched_matmul(t, query, key, shape.scores, spec.head_dim)
    weights = t.elementwise(OperationKind.FUSED_SOFTMAX, scores)
    weights = dropout(t, weights, spec.dropout)
    return t.contiguous(batched_matmul(t, weights, value, shape.outputs, shape.keys))
