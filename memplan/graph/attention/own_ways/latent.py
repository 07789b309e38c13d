"""Multi-head latent attention, as DeepSeek's classes in transformers 5.23 train with it.

Hidden states pass through narrow vectors on their way to queries and to keys and values. Part of
each head is rotated; the keys' rotated part is one vector that all heads share, copied into a new
tensor beside their own parts. Query and value heads differ in size, so flash attention is not taken.
"""

from memplan.errors import UnsupportedOperationError
from memplan.graph.attention.head_layout import Shape, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.splits import Sharing
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import rotary
from memplan.graph.stack_context import StackContext
from memplan.model.attention import RotarySpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.parameters import WeightRole


def latent_attention(
    t: Tape, x: Tensor, spec: LatentAttentionSpec, context: StackContext
) -> Tensor:
    """Queries, keys and values through their narrow vectors, attention, output projection."""
    tokens = context.batch * context.seq_len
    heads, rotated = spec.num_heads, spec.rotary.dim
    query, narrow_query = latent_query(t, x, spec, context)
    parts = _query_parts(t, by_head(t, query), spec, tokens)
    narrow = linear(
        t, x, "self_attn.kv_a_proj_with_mqa", context.hidden_size,
        spec.key_value_rank + rotated, bias=spec.bias,
    )  # fmt: skip
    narrow = _for_all_ranks(t, narrow, tokens * spec.key_value_rank, tokens * rotated)
    latent, turning_key = t.split(narrow, tokens * spec.key_value_rank, tokens * rotated)
    latent = norm(t, latent, spec.norm, "self_attn.kv_a_layernorm", spec.key_value_rank)
    query_states, turned_query, turned_key = _positioned(t, parts, turning_key, spec, context)
    key, value = keys_and_values(t, latent, turned_key, spec, tokens)
    shape = Shape(
        context.batch, context.seq_len, context.seq_len, spec.scores,
        heads_split=not t.decomposed and splits_heads(t, spec.scores),
    )  # fmt: skip
    mask = context.mask
    held: tuple[Tensor, ...] = ()
    if spec.is_sparse and mask is not None:
        mask, held = _sparse(t, x, narrow_query, spec, context, mask)
    out = attend(t, query_states, key, value, shape, mask)
    width = heads * spec.value_head_dim
    out = linear(
        t, out, "self_attn.o_proj", width, context.hidden_size, bias=spec.bias,
        split=t.options.split_plan.attention.rows, role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    t.touch(x, query, turned_query, narrow, latent, turned_key, query_states, key, value, *held)
    return out


def _sparse(
    t: Tape,
    x: Tensor,
    narrow_query: Tensor,
    spec: LatentAttentionSpec,
    context: StackContext,
    mask: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask of the tokens that this layer has chosen, or the one that handed its choice on."""
    from memplan.graph.attention.own_ways.indexer import (  # only for DeepSeek-V3.2
        chosen_tokens,
        masked_but,
    )

    chosen = context.chosen
    if spec.indexer is not None:
        assert spec.query_rank is not None
        sizes = (context.batch, context.seq_len, context.hidden_size, spec.query_rank)
        chosen = chosen_tokens(t, x, narrow_query, spec.indexer, sizes)
    if chosen is None:
        msg = (
            "a pipeline's later stage cannot begin with a layer that shares an earlier layer's choice of "
            "tokens: split it before a layer with an indexer of its own (layers_per_stage)"
        )
        raise UnsupportedOperationError(msg)
    if spec.hands_on and spec.indexer is not None:
        context.chosen = chosen
        t.carry(chosen)
        if t.segment.checkpointed:
            # An argument of the next layer, which its checkpoint keeps.
            t.segment.handed_in |= {chosen.storage}
    mask, held = masked_but(t, chosen, context.batch * context.seq_len**2, mask)
    return mask, (*held, narrow_query, mask)


def latent_query(
    t: Tape, x: Tensor, spec: LatentAttentionSpec, context: StackContext
) -> tuple[Tensor, Tensor]:
    """One layer, or two with a norm on the narrow vector between them; and what went into it."""
    width = spec.num_heads * (spec.plain_head_dim + spec.rotary.dim)
    columns = t.options.split_plan.attention.columns
    if spec.query_rank is None:
        return linear(
            t,
            x,
            "self_attn.q_proj",
            context.hidden_size,
            width,
            split=columns,
            role=WeightRole.QUERY_KEY,
        ), x
    narrow = linear(
        t, x, "self_attn.q_a_proj", context.hidden_size, spec.query_rank, bias=spec.bias
    )
    normed = norm(t, narrow, spec.norm, "self_attn.q_a_layernorm", spec.query_rank)
    t.touch(narrow)
    query = linear(t, normed, "self_attn.q_b_proj", spec.query_rank, width, split=columns)
    return query, normed


def _for_all_ranks(t: Tape, narrow: Tensor, *numels: int) -> Tensor:
    """Keys' rotated part, which every rank's heads read, has its gradients added up on its own.

    (transformers 5.23, distributed/tensor_parallel.py, ``MlaKvAProjParallel``)
    """
    group = t.options.tensor_parallel
    apart = t.options.split_plan.attention is Sharing.SPLIT
    if group is None or group.sequence or not apart:
        return narrow
    from memplan.graph.splitting.tensor_parallel import shared_experts_input  # only then

    latent, turning = t.split(narrow, *numels)
    return t.concatenate(latent, shared_experts_input(t, turning))


def by_head(t: Tape, x: Tensor) -> Tensor:
    """A view with the heads before the rows; its gradient is copied back into rows."""
    out = t.view(x, x.numel)
    t.record(OperationKind.TRANSPOSE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def keys_and_values(
    t: Tape, latent: Tensor, turned: Tensor, spec: LatentAttentionSpec, tokens: int
) -> tuple[Tensor, Tensor]:
    """``expand_kv``: both out of the narrow vector, the keys copied together with what is shared."""
    heads, plain, rotated = spec.num_heads, spec.plain_head_dim, spec.rotary.dim
    both = linear(
        t, latent, "self_attn.kv_b_proj", spec.key_value_rank, heads * (plain + spec.value_head_dim),
        split=t.options.split_plan.attention.columns,
    )  # fmt: skip
    own, value = t.split(
        by_head(t, both), tokens * heads * plain, tokens * heads * spec.value_head_dim
    )
    shared = t.view(turned, tokens * heads * rotated)
    t.record(OperationKind.EXPAND, (turned,), (shared,), gradients=(Gradient.FRESH,))
    empty = t.tensor(tokens * heads * (plain + rotated), both.dtype)
    t.record(OperationKind.NEW_EMPTY, (), (empty,))
    key = copy_into(t, copy_into(t, empty, own), shared)
    key.by_head = True
    t.touch(both)
    return key, value


def copy_into(t: Tape, base: Tensor, part: Tensor) -> Tensor:
    """Fill a slice in place (``CopySlices``): backward copies the whole gradient, and the slice.

    The copy of the whole, with the slice zeroed, is the gradient of what was there before.
    """
    out = t.view(base, base.numel)
    whole = base.storage.num_bytes
    zeros = allocated_bytes(part.numel, base.dtype)
    scratch: int | tuple[int, ...] = zeros
    if part.dtype is not base.dtype and not t.decomposed:
        scratch = (RESULT, zeros, zeros, RESULT)  # and the slice's is cast
    if not base.requires_grad:
        scratch = whole if t.decomposed else (whole, RESULT)
    t.record(
        OperationKind.COPY_IN_PLACE, (base, part), (out,), gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    return out


def _query_parts(
    t: Tape, query: Tensor, spec: LatentAttentionSpec, tokens: int
) -> tuple[Tensor, Tensor]:
    """What has no positions of a query, and what has; without positions, all of it twice."""
    if not spec.rotates:
        return query, query
    rows = tokens * spec.num_heads
    plain, turning = t.split(query, rows * spec.plain_head_dim, rows * spec.rotary.dim)
    return plain, turning


def _positioned(
    t: Tape,
    parts: tuple[Tensor, Tensor],
    key: Tensor,
    spec: LatentAttentionSpec,
    context: StackContext,
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole queries, their part that has positions, and the keys' part that has."""
    plain, turning = parts
    if not spec.rotates:
        return plain, turning, key
    turned_query, turned_key = _turned(t, turning, key, spec.rotary, context)
    states = t.concatenate(plain, turned_query)
    states.by_head = True
    return states, turned_query, turned_key


def _turned(
    t: Tape, query: Tensor, key: Tensor, form: RotarySpec, context: StackContext
) -> tuple[Tensor, Tensor]:
    """The parts of queries and keys that are rotated."""
    cos, sin = context.cos, context.sin
    assert cos is not None
    assert sin is not None
    if form.paired:
        cut = [(t.slice(x, x.numel // 2), t.slice(x, x.numel // 2)) for x in (query, key)]
        turned = [_turned_in_pairs(t, even, odd, cos, sin) for even, odd in cut]
        return turned[0], turned[1]
    return rotary(t, query, cos, sin), rotary(t, key, cos, sin)


def _turned_in_pairs(t: Tape, even: Tensor, odd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rotary_pos_emb_interleave``, which cuts queries and keys first: joined in halves."""
    first = _difference(t, t.mul(even, cos), t.mul(odd, sin))
    second = t.add(t.mul(odd, cos), t.mul(even, sin))
    return t.concatenate(first, second)


def _difference(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    out = t.tensor(left.numel, left.dtype)
    t.record(OperationKind.SUB, (left, right), (out,), gradients=(Gradient.ALIAS, Gradient.FRESH))
    return out
