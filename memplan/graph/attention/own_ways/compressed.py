"""Attention of one head for keys and values alike, with compressed entries (``DeepseekV4Attention``).

Queries pass a narrow vector. The one head's states are key and value of every query head; entries that
a compressor makes of windows of tokens are joined to them, and their own mask to the causal one. What
comes out is turned back, and projected in groups of heads.
"""

from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.own_ways.compressor import compressed_entries, windows_of
from memplan.graph.attention.rotary import turn_last
from memplan.graph.attention.sinks import sink_attention
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.norms import norm, norm_unweighted
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.compressed import CompressedAttentionSpec
from memplan.model.parameters import WeightRole


def compressed_attention(
    t: Tape, x: Tensor, spec: CompressedAttentionSpec, context: StackContext
) -> Tensor:
    """Queries, the head and its entries, attention with sinks, the grouped output."""
    scores, hidden = spec.scores, context.hidden_size
    width = scores.num_heads * scores.head_dim
    cos, sin = context.tables_of(compressed=spec.compressor is not None)
    narrow = norm(
        t, linear(t, x, "self_attn.q_a_proj", hidden, spec.query_rank), spec.norm,
        "self_attn.q_a_norm", spec.query_rank,
    )  # fmt: skip
    query = linear(
        t, narrow, "self_attn.q_b_proj", spec.query_rank, width, role=WeightRole.QUERY_KEY
    )
    query = turn_last(t, norm_unweighted(t, query, scores.head_dim), scores, cos, sin)
    states = linear(t, x, "self_attn.kv_proj", hidden, scores.head_dim, role=WeightRole.QUERY_KEY)
    states = norm(t, states, spec.norm, "self_attn.kv_norm", scores.head_dim)
    states = turn_last(t, states, scores, cos, sin)
    mask, length = context.sliding_mask, context.seq_len
    held: tuple[Tensor, ...] = ()
    if spec.compressor is not None:
        states, mask, length, held = _joined(t, x, narrow, states, mask, spec, context)
    shape = Shape(context.batch, context.seq_len, length, scores)
    out = sink_attention(t, query, states, states, shape, mask)
    opposite = t.scale(sin, OperationKind.NEG)
    out = turn_last(t, out, scores, cos, opposite)
    made = _output(t, out, spec, context)
    t.touch(states, *held, out, x)
    return made


def _joined(
    t: Tape,
    x: Tensor,
    narrow: Tensor,
    states: Tensor,
    mask: Tensor | None,
    spec: CompressedAttentionSpec,
    context: StackContext,
) -> tuple[Tensor, Tensor | None, int, tuple[Tensor, ...]]:
    """The states with the entries behind them, the mask of both, and how many there are."""
    compressor = spec.compressor
    assert compressor is not None
    entries, bias = compressed_entries(t, x, narrow, compressor, spec, context)
    joined = t.concatenate(states, entries)
    joined.by_head = True
    t.touch(states)
    length = context.seq_len + windows_of(context, compressor)
    if mask is None:
        return joined, mask, length, (entries, bias)
    wider = t.tensor(context.batch * context.seq_len * length, mask.dtype)
    t.record(OperationKind.CAT, (mask, bias), (wider,), gradients=(Gradient.NONE, Gradient.NONE))
    return joined, wider, length, (wider, bias, entries)


def _output(t: Tape, x: Tensor, spec: CompressedAttentionSpec, context: StackContext) -> Tensor:
    """Each group of heads to a narrow vector, then all of them to the hidden size."""
    scores, groups = spec.scores, spec.output_groups
    width = groups * spec.output_rank
    inner = scores.num_heads * scores.head_dim // groups
    given = t.scale(x, OperationKind.CLONE)
    weight = t.matrix("self_attn.o_a_proj.weight", width, inner, role=WeightRole.ATTENTION_OUTPUT)
    factor: Tensor = weight
    if t.autocast is not None:
        given, factor = t.cast(given, t.autocast), t.cast(weight, t.autocast)
    rows = context.batch * context.seq_len
    out = t.tensor(rows * width, given.dtype)
    t.record(
        OperationKind.MATMUL, (given, factor), (out,), saves=(factor, given),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * rows * weight.numel,
    )  # fmt: skip
    return linear(
        t, t.scale(out, OperationKind.CLONE), "self_attn.o_b_proj", width, context.hidden_size,
        role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
