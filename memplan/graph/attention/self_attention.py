"""Self-attention as transformers' shared attention functions run it."""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.output_gate import gated_output, gated_projections
from memplan.graph.attention.paths import attend
from memplan.graph.attention.projections import keys_in_columns, project
from memplan.graph.attention.rotary import (
    rotate,
    scaled_by_position,
    turned_in_place,
    turns_heads,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec, OutputGate, Projection, QueryScaling
from memplan.model.parameters import WeightRole


def self_attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    """Queries, keys and values of the hidden states, attention, output projection."""
    frame: list[Tensor] = []
    gate = None
    mask = context.mask if spec.sliding_window is None else context.sliding_mask
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    if splits_heads(t, spec):
        shape = replace(shape, heads_split=spec.output_gate is not OutputGate.QUERIES)
    if spec.output_gate is OutputGate.QUERIES:
        query, key, value, gate = gated_projections(t, x, spec, context.hidden_size)
    else:
        query, key, value = project(t, x, spec, context, shape)
    if spec.is_projected_first and (shape.heads_split or turns_heads(t, spec)):
        if not turned_in_place(t, spec):
            query = as_heads(t, query, spec.num_heads)
            columns = keys_in_columns(spec, shape)
            key = as_heads(t, key, spec.num_kv_heads, in_columns=columns)
        value = as_heads(t, value, spec.num_kv_heads) if shape.heads_split else value
    query, key = _placed(t, query, key, spec, context, frame)
    if spec.fills_cache and not t.options.checkpointed_layers:
        key, value = _cached(t, key, key.dtype), _cached(t, value, key.dtype)
    out = attend(t, query, key, value, shape, mask)
    if spec.output_gate is not OutputGate.NONE:
        out = gated_output(t, x, out, gate, spec, context.hidden_size)
    width = spec.num_heads * (spec.value_head_dim or spec.head_dim)
    if spec.output_apart:
        t.touch(query, key, value, *frame)
        query = key = value = out
        frame = []
        context.attention_frame = (out, x)
    out = linear(
        t,
        out,
        "self_attn.o_proj",
        width,
        context.hidden_size,
        bias=spec.output_bias,
        split=t.options.split_plan.attention.rows,
        role=WeightRole.ATTENTION_OUTPUT,
    )
    context.attention_variables = (query, key, value, *frame, x)
    t.touch(*context.attention_variables)
    if gate is not None:
        t.touch(gate)
    return out


def _placed(
    t: Tape,
    query: Tensor,
    key: Tensor,
    spec: AttentionSpec,
    context: StackContext,
    frame: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Queries and keys normalized, and turned or scaled by their positions."""
    is_normalized = spec.query_key_norm_at_once or spec.output_gate is OutputGate.QUERIES
    if not spec.query_key_norm_last and not is_normalized:
        query, key = _normalized(t, query, key, spec)
    if spec.rotary is not None:
        cos, sin = context.tables(spec)
        if t.options.casts_inputs:
            cos, sin = t.cast_argument(cos, t.compute), t.cast_argument(sin, t.compute)
        query, key = rotate(t, query, key, spec, cos, sin, frame)
    if spec.query_key_norm_last:
        query, key = _normalized(t, query, key, spec)
    if spec.query_scaled_by_position:
        full = spec.position_factors_upcast
        query = scaled_by_position(t, query, context, DType.FP32 if full else None)
    return query, key


def _cached(t: Tape, x: Tensor, dtype: DType) -> Tensor:
    """``DynamicCache.update``: joined to an empty tensor of the keys' dtype; the outputs hold it."""
    joined = t.tensor(x.numel, dtype)
    gradient = Gradient.ALIAS if x.dtype is dtype else Gradient.FRESH
    t.record(OperationKind.CAT, (x,), (joined,), gradients=(gradient,))
    joined.by_head = True
    t.cache(joined)
    return joined


def _normalized(t: Tape, query: Tensor, key: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Queries and keys through their norms, where they have some."""
    kind = spec.query_key_norm
    if kind is None:
        return query, key
    # Of every head's columns in one projection a third is taken: no rows, unless autocast copies them.
    strided = spec.projection is Projection.FUSED_SELECTED and t.autocast is None
    query = norm(t, query, kind, "self_attn.q_norm", spec.head_dim, strided=strided)
    if spec.query_scaling is QueryScaling.NORMED:
        query = t.scale(query)
    return query, norm(t, key, kind, "self_attn.k_norm", spec.head_dim, strided=strided)
