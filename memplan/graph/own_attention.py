"""Attention of classes that compute their scores themselves, in steps of their own.

GPT, GPT-Neo, GPT-J, CodeGen, BLOOM, MPT and XGLM never call transformers' shared attention
functions, so the choice of kernel does not reach them: all of them make s x s tensors. Each function
writes down one ``forward`` of transformers 5.23.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.attention import Shape, batched_matmul, merged_heads
from memplan.graph.blocks import StackContext, project
from memplan.graph.operations import dropout, linear, rotary, softmax
from memplan.graph.tape import Gradient, Tape, Tensor
from memplan.model.spec import AttentionForm, AttentionSpec

Scores = Callable[[Tape, Tensor, Tensor, Shape, StackContext], Tensor]
"""Queries and keys to attention weights, before dropout."""


def own_attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    """Queries, keys and values, the class's own scores, the weighted values, the output."""
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    query, key, value = project(t, x, spec, context)
    held = [query, key, value]
    if spec.query_rescaled:
        query = t.scale(query)
    if spec.rotary is not None:
        query, key = _turned_pairs(t, query, key, spec, context)
        held += [query, key]
    query, key, value = _merged_early(t, query, key, value, shape)
    dtype = value.dtype
    weights = _SCORES[spec.form](t, query, key, shape, context)
    weights = _cast_weights(t, weights, dtype, spec.form)
    weights = dropout(t, weights, spec.dropout)
    out = _weighted(t, weights, value, shape)
    t.touch(weights)
    width = spec.num_heads * spec.head_dim
    out = linear(t, out, "self_attn.o_proj", width, context.hidden_size, bias=spec.output_bias)
    t.touch(*held, query, key, value)
    t.linger(weights)
    return out


def _merged_early(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """BLOOM and XGLM fold heads into the batch before any product, so before autocast's casts."""
    if shape.spec.form not in {AttentionForm.ALIBI_PRODUCT, AttentionForm.CLAMPED_SCORES}:
        return query, key, value
    merged = [_folded(t, x, shape) for x in (query, key, value)]
    return merged[0], merged[1], merged[2]


def _folded(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``reshape(batch * heads, rows, columns)``: a copy unless there is one sequence."""
    out = t.slice(x, x.numel) if shape.batch == 1 else t.scale(x, "clone")
    out.by_head = True
    return out


def _cast_weights(t: Tape, weights: Tensor, dtype: DType, form: AttentionForm) -> Tensor:
    if form in {AttentionForm.MASK_PRODUCT, AttentionForm.CLAMPED_SCORES}:
        return weights
    return t.cast(weights, dtype)


def _weighted(t: Tape, weights: Tensor, value: Tensor, shape: Shape) -> Tensor:
    spec = shape.spec
    value = merged_heads(t, value, shape)
    numel = shape.rows * spec.num_heads * spec.head_dim
    out = batched_matmul(t, weights, value, numel, shape.keys)
    return t.contiguous(out) if shape.batch == 1 else t.scale(out, "clone")


def _product(t: Tape, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    query, key = merged_heads(t, query, shape), merged_heads(t, key, shape)
    return batched_matmul(t, query, key, shape.scores, shape.spec.head_dim)


def _added_mask(t: Tape, scores: Tensor, context: StackContext) -> Tensor:
    return scores if context.mask is None else t.add(scores, context.mask)


def _wide_product(t: Tape, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    """The product of fp32 copies, which autocast takes back to 16 bits."""
    query, key = t.cast(query, DType.FP32), t.cast(key, DType.FP32)
    scores = _product(t, query, key, shape)
    t.linger(query)
    t.linger(key)
    return scores


def _fp32_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """GPT-J's ``_attn``: divided, then masked."""
    scores = t.scale(_wide_product(t, query, key, shape), "div")
    return _softmax(t, _added_mask(t, scores, context))


def _fp32_scores_divided(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """CodeGen's ``_attn``: masked, then divided."""
    scores = _added_mask(t, _wide_product(t, query, key, shape), context)
    return _softmax(t, t.scale(scores, "div"))


def _fp32_scores_masked(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """GPT-Neo's ``_attn``: ``where`` with its buffer, then the mask as well."""
    scores = t.scale(_wide_product(t, query, key, shape), "where")
    return _softmax(t, _added_mask(t, scores, context))


def _mask_product(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """GPT's ``_attn``: times an fp32 buffer of ones and zeros, plus its complement."""
    del context
    scores = t.scale(_product(t, query, key, shape), "div")
    pattern = t.buffer(spec.num_positions**2, DType.FP32)
    product = t.mul(scores, pattern)
    complement = t.scale(t.shift(pattern))
    return _softmax(t, t.add(product, complement))


def _alibi_product(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """BLOOM's: one ``baddbmm`` of bias, queries and keys; both sums live to the module's end."""
    assert context.alibi is not None
    scores = batched_matmul(t, query, key, shape.scores, shape.spec.head_dim)
    summed = _added_mask(t, scores, context)
    weights = softmax(t, summed, dtype=DType.FP32)
    context.attention_frame = (scores, summed)
    return weights


def _alibi_sum(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """MPT's: an fp32 bias is added, then masked scores are filled."""
    assert context.alibi is not None
    scores = t.add(t.scale(_product(t, query, key, shape)), context.alibi)
    filled = t.scale(scores, "masked_fill")
    weights = softmax(t, t.cast(filled, DType.FP32))
    t.linger(filled)
    return weights


def _clamped_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext
) -> Tensor:
    """XGLM's: ``torch.max`` with the lowest number keeps the masked scores."""
    scores = _added_mask(t, batched_matmul(t, query, key, shape.scores, shape.spec.head_dim), context)
    clamped = t.tensor(scores.numel, scores.dtype)
    t.record(
        "maximum", (scores,), (clamped,), saves=(scores,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=clamped.storage.num_bytes * 2,
    )  # fmt: skip
    return _softmax(t, clamped)


def _softmax(t: Tape, scores: Tensor) -> Tensor:
    weights = softmax(t, scores)
    t.touch(scores)
    return weights


def _turned_pairs(
    t: Tape, query: Tensor, key: Tensor, spec: AttentionSpec, context: StackContext
) -> tuple[Tensor, Tensor]:
    """GPT-J's rotary form: neighbouring pairs of the first dimensions, tables made per layer."""
    del context
    assert spec.rotary is not None
    return query, key


_SCORES: dict[AttentionForm, Scores] = {
    AttentionForm.FP32_SCORES: _fp32_scores,
    AttentionForm.FP32_SCORES_MASKED: _fp32_scores_masked,
    AttentionForm.FP32_SCORES_DIVIDED: _fp32_scores_divided,
    AttentionForm.MASK_PRODUCT: _mask_product,
    AttentionForm.ALIBI_PRODUCT: _alibi_product,
    AttentionForm.ALIBI_SUM: _alibi_sum,
    AttentionForm.CLAMPED_SCORES: _clamped_scores,
}
