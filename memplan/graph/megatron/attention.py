"""Self-attention as Megatron's local layers run it: one matrix for q, k and v, scores written out.

Megatron-core 0.16.1, core/transformer/attention.py (``SelfAttention``), dot_product_attention.py,
core/models/common/embeddings/rope_utils.py.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.norms import norm
from memplan.graph.operations.elementwise import dropout
from memplan.model.attention import AttentionSpec

FUSED_SOFTMAX_TOKENS = 4096
"""The most keys that the fused kernel takes (core/fusions/fused_softmax.py, ``is_kernel_available``)."""
FUSED_SOFTMAX_ROWS = 4
"""It takes so many matrices of scores at a time, or twice as many of short rows."""
SHORT_ROW = 128
SHORTEST_ROW = 16


def split_heads(
    c: MegatronContext, mixed: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values, which lie group by group; the queries of several are copied."""
    t = c.tape
    query_size = c.tokens * spec.num_heads * spec.head_dim
    key_size = c.tokens * spec.num_kv_heads * spec.head_dim
    query, key, value = t.split(mixed, query_size, key_size, key_size)
    if spec.num_kv_heads > 1 and spec.num_heads > spec.num_kv_heads:
        query = t.contiguous(query)
    if spec.query_key_norm is not None:
        query = norm(c, query, spec.query_key_norm, "self_attention.q_layernorm", spec.head_dim)
        key = norm(c, key, spec.query_key_norm, "self_attention.k_layernorm", spec.head_dim)
    return query, key, value


def rotary(c: MegatronContext, x: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` with tables made for it alone (``_apply_rotary_pos_emb_bshd``)."""
    t = c.tape
    assert c.frequencies is not None
    cos, sin = (_table(c, kind) for kind in (OperationKind.COS, OperationKind.SIN))
    straight = t.mul(x, cos)
    first, second = t.split(x, x.numel // 2, x.numel // 2)
    turned = t.concatenate(t.scale(second, OperationKind.NEG), first)
    turned = t.mul(turned, sin)
    both = t.add(straight, turned)
    out = t.tensor(x.numel, x.dtype)
    # Joined with what is not turned, of which there is nothing.
    t.record(OperationKind.CAT, (both,), (out,), gradients=(Gradient.ALIAS,))
    t.touch(both)
    return out


def _table(c: MegatronContext, kind: OperationKind) -> Tensor:
    """Cosines or sines of the angles, times a constant, in the compute format."""
    t, frequencies = c.tape, c.frequencies
    assert frequencies is not None
    wide = frequencies.storage.num_bytes
    out = t.tensor(frequencies.numel, c.dtype)
    t.record(kind, (frequencies,), (out,), forward_scratch_bytes=(wide, wide, ~0, RESULT))
    return out


def core_attention(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    """Scores into a new tensor beside a blank one of the global buffer, softmax, dropout, product.

    The function's variables hold the scores, and keys and values repeated for their queries, until it
    returns.
    """
    t = c.tape
    held = [query, key, value]
    if spec.num_heads > spec.num_kv_heads:
        key, value = (_repeated(c, each, spec) for each in (key, value))
        held += [key, value]
    num_scores = c.batch * spec.num_heads * c.seq_len * c.seq_len
    c.use_global_buffer(num_scores)
    scores = t.tensor(num_scores, c.dtype)
    flops = 2 * num_scores * spec.head_dim
    sizes = [allocated_bytes(each.numel, c.dtype) for each in (query, key)]
    t.record(
        OperationKind.BADDBMM, (query, key), (scores,), saves=(query, key),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=flops,
        # Each gradient is a product, and then the product scaled.
        backward_scratch_bytes=(sizes[0], RESULT, ~0, sizes[1], RESULT),
    )  # fmt: skip
    weights = softmax(c, scores, spec.num_heads)
    weights = dropout(t, weights, spec.dropout)
    product = t.tensor(query.numel, c.dtype)
    t.record(
        OperationKind.MATMUL, (weights, value), (product,), saves=(weights, value),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=flops,
    )  # fmt: skip
    out = t.contiguous(product)
    t.touch(scores, weights, *held)
    return out


def _repeated(c: MegatronContext, x: Tensor, spec: AttentionSpec) -> Tensor:
    """``repeat_interleave``: each key or value once for each of its queries."""
    t = c.tape
    out = t.tensor(x.numel // spec.num_kv_heads * spec.num_heads, x.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def softmax(c: MegatronContext, scores: Tensor, num_heads: int) -> Tensor:
    """Scale, mask and softmax in one kernel, whose backward pass writes over the gradient it is given.

    (core/fusions/fused_softmax.py) Of what that kernel does not take, in torch's own steps, the scores in
    fp32 where that is asked for.
    """
    t = c.tape
    if c.settings.masked_softmax_fusion and _is_fused(c, num_heads):
        out = t.tensor(scores.numel, scores.dtype)
        gradient = Gradient.FRESH if t.decomposed else Gradient.ALIAS
        t.record(
            OperationKind.FUSED_SOFTMAX, (scores,), (out,), saves=(out,), gradients=(gradient,),
            in_python=True,
        )  # fmt: skip
        return out
    wide = t.cast(scores, DType.FP32) if c.settings.attention_softmax_in_fp32 else scores
    masked = _masked(c, wide, is_view=wide is scores)
    out = t.tensor(masked.numel, masked.dtype)
    t.record(
        OperationKind.SOFTMAX, (masked,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=0 if t.decomposed else out.storage.num_bytes,
    )  # fmt: skip
    return t.cast(out, scores.dtype)


def _masked(c: MegatronContext, scores: Tensor, *, is_view: bool) -> Tensor:
    """``masked_fill_`` with a causal mask made for it, which is kept.

    On a view of the product autograd copies the gradient, and a slice of that (torch 2.13,
    csrc/autograd/functions/tensor.cpp, ``CopySlices``).
    """
    t = c.tape
    mask = t.tensor(c.seq_len * c.seq_len, DType.BOOL)
    wide = allocated_bytes(mask.numel, DType.FP32)
    t.record(OperationKind.TRIU, (), (mask,), forward_scratch_bytes=(wide, wide, ~0, RESULT))
    size = scores.storage.num_bytes
    out = t.view(scores, scores.numel)
    t.record(
        OperationKind.MASKED_FILL_IN_PLACE, (scores, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=(RESULT, size, size) if is_view else (),
    )  # fmt: skip
    return out


def _is_fused(c: MegatronContext, num_heads: int) -> bool:
    """Whether the fused kernel takes the scores (``is_kernel_available``, ``get_batch_per_block``)."""
    keys, matrices = c.seq_len, c.batch * num_heads
    together = FUSED_SOFTMAX_ROWS * (2 if keys <= SHORT_ROW else 1)
    divides = keys % FUSED_SOFTMAX_ROWS == 0 and matrices % together == 0
    return c.dtype.is_half and SHORTEST_ROW < keys <= FUSED_SOFTMAX_TOKENS and divides
