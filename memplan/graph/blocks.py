"""The blocks that families share: attention, feed-forward networks, mixtures, whole layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.graph.attention import Shape, as_heads, attend, splits_heads
from memplan.graph.operations import activation_module, clamp, dropout, linear, norm
from memplan.graph.output_gate import gate_states, gated_output, gated_projections
from memplan.graph.rotary import rotate, turns_heads
from memplan.graph.segments import Gradient
from memplan.model.attention import AttentionForm, AttentionSpec, OutputGate, Projection
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.records import dataclass
from memplan.training.kernels import FeedForwardKernel

if TYPE_CHECKING:
    from memplan.dtypes import DType
    from memplan.graph.tape import Tape
    from memplan.graph.tensors import Tensor
    from memplan.model.mixers import TokenMixer


@dataclass(slots=True)
class StackContext:
    """What the layers of a stack share: sizes, position tables, masks."""

    hidden_size: int
    batch: int
    seq_len: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    mask: Tensor | None = None
    """None where the kernel knows the pattern itself."""
    sliding_mask: Tensor | None = None
    """For layers with a sliding window."""
    memory: Tensor | None = None
    """The encoder's output, in a decoder."""
    memory_len: int = 0
    bias: Tensor | None = None
    """The position bias of self-attention that the first layer made (T5)."""
    cross_bias: Tensor | None = None
    """That of cross attention."""
    alibi: Tensor | None = None
    """Slopes times positions, for every head."""
    attention_frame: tuple[Tensor, ...] = ()
    """What an attention module still holds while it adds the residual itself (BLOOM)."""
    distances: Tensor | None = None
    """The table of relative distances (DeBERTa)."""
    relative: Tensor | None = None
    """The distance of each pair of tokens."""
    local_cos: Tensor | None = None
    local_sin: Tensor | None = None
    """Tables of their own for layers with a sliding window (Gemma 3)."""

    def tables(self, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Cosines and sines for one kind of layer."""
        cos, sin = self.cos, self.sin
        if spec.sliding_window is not None and self.local_cos is not None:
            cos, sin = self.local_cos, self.local_sin
        if cos is None or sin is None:
            msg = "a layer turns its heads, but the stack has made no tables"
            raise ValueError(msg)
        return cos, sin


def self_attention(t: Tape, x: Tensor, spec: TokenMixer, context: StackContext) -> Tensor:
    """Queries, keys and values of the hidden states, attention, output projection."""
    if not isinstance(spec, AttentionSpec):
        from memplan.graph.token_mixers import other_mixer  # only for rarer models

        return other_mixer(t, x, spec, context)
    if spec.form is AttentionForm.SEGMENTS:
        from memplan.graph.prompts import segment_attention  # only for CPM-Ant

        return segment_attention(t, x, spec, context)
    if spec.form is not AttentionForm.INTERFACE:
        from memplan.graph.own_attention import own_attention  # only for older classes

        return own_attention(t, x, spec, context)
    if spec.distances is not None:
        from memplan.graph.disentangled import disentangled_attention  # only for DeBERTa

        return disentangled_attention(t, x, spec, context)
    frame: list[Tensor] = []
    gate = None
    mask = context.mask if spec.sliding_window is None else context.sliding_mask
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    if splits_heads(t, spec):
        shape = replace(shape, heads_split=spec.output_gate is not OutputGate.QUERIES)
    beside = spec.output_gate is OutputGate.QUERIES
    if beside:
        query, key, value, gate = gated_projections(t, x, spec, context.hidden_size)
    else:
        query, key, value = project(t, x, spec, context, shape)
    if spec.output_gate is OutputGate.SIGMOID:
        gate = gate_states(t, x, spec, context.hidden_size)
    if spec.projection_clamped:
        query, key, value = (clamp(t, part) for part in (query, key, value))
    if spec.views_last and (shape.heads_split or turns_heads(t, spec)):
        query = as_heads(t, query, spec.num_heads)
        key = as_heads(t, key, spec.num_kv_heads)
        value = as_heads(t, value, spec.num_kv_heads) if shape.heads_split else value
    if spec.query_rescaled:
        query = t.scale(query)
    if not spec.query_key_norm_last and not spec.query_key_norm_at_once and not beside:
        query, key = _normalized(t, query, key, spec)
    if spec.rotary is not None:
        cos, sin = context.tables(spec)
        query, key = rotate(t, query, key, spec, cos, sin, frame)
    if spec.query_key_norm_last:
        query, key = _normalized(t, query, key, spec)
    if spec.query_scaled_by_position:
        query = _scaled_by_position(t, query, context)
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
        context.attention_frame = (out,)
    out = linear(t, out, "self_attn.o_proj", width, context.hidden_size, bias=spec.output_bias)
    t.touch(query, key, value, *frame, x)
    if gate is not None:
        t.touch(gate)
    return out


def _cached(t: Tape, x: Tensor, dtype: DType) -> Tensor:
    """``DynamicCache.update``: joined to an empty tensor of the keys' dtype; the outputs hold it."""
    joined = t.tensor(x.numel, dtype)
    gradient = Gradient.ALIAS if x.dtype is dtype else Gradient.FRESH
    t.record("cat", (x,), (joined,), gradients=(gradient,))
    joined.by_head = True
    t.cache(joined)
    return joined


def _scaled_by_position(t: Tape, query: Tensor, context: StackContext) -> Tensor:
    """Ministral 3's: one factor for each position, the same for all heads."""
    factors = t.tensor(context.seq_len, query.dtype)
    t.record("position_factors", (), (factors,))
    return t.mul(query, factors)


def _normalized(t: Tape, query: Tensor, key: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Queries and keys through their norms, where they have some."""
    kind = spec.query_key_norm
    if kind is None:
        return query, key
    query_width, key_width = _norm_widths(spec)
    query_groups, key_groups = (
        (spec.num_heads, spec.num_kv_heads) if spec.query_key_norm_weight_per_head else (1, 1)
    )
    return (
        norm(t, query, kind, "self_attn.q_norm", query_width, groups=query_groups),
        norm(t, key, kind, "self_attn.k_norm", key_width, groups=key_groups),
    )


def _norm_widths(spec: AttentionSpec) -> tuple[int, int]:
    if spec.query_key_norm_per_head:
        return spec.head_dim, spec.head_dim
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def project(
    t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext, shape: Shape | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, in one linear layer or three."""
    hidden = context.hidden_size
    split = shape is not None and shape.heads_split
    # Heads that were turned get their gradients head by head from any kernel.
    turned = split or turns_heads(t, spec)
    query_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    if spec.projection is Projection.SEPARATE:
        apart = not spec.views_last
        query = linear(t, x, "self_attn.q_proj", hidden, query_size, bias=spec.query_bias)
        query = _heads(t, query, spec, "q", spec.num_heads, viewed=turned and apart)
        key = linear(t, x, "self_attn.k_proj", hidden, kv_size, bias=spec.key_bias)
        key = _heads(t, key, spec, "k", spec.num_kv_heads, viewed=turned and apart)
        width = spec.num_kv_heads * (spec.value_head_dim or spec.head_dim)
        value = linear(t, x, "self_attn.v_proj", hidden, width, bias=spec.value_bias)
        value = as_heads(t, value, spec.num_kv_heads) if split and apart else value
        return query, key, t.scale(value) if spec.value_scaled else value
    query, key, value = _fused_projection(t, x, spec, hidden)
    if split:
        query = as_heads(t, query, spec.num_heads)
        key, value = (as_heads(t, part, spec.num_kv_heads) for part in (key, value))
    return query, key, value


def _heads(
    t: Tape, x: Tensor, spec: AttentionSpec, name: str, num_heads: int, *, viewed: bool
) -> Tensor:
    """A projection as heads, normed at once where the class does so: each head, or all before."""
    kind = spec.query_key_norm if spec.query_key_norm_at_once else None
    each = spec.query_key_norm_per_head
    module, width = f"self_attn.{name}_norm", num_heads * spec.head_dim
    if kind is not None and not each:
        x = norm(t, x, kind, module, width)
    x = as_heads(t, x, num_heads) if viewed else x
    return norm(t, x, kind, module, spec.head_dim) if kind is not None and each else x


def _fused_projection(
    t: Tape, x: Tensor, spec: AttentionSpec, hidden: int
) -> tuple[Tensor, Tensor, Tensor]:
    query_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    width = query_size + 2 * kv_size
    fused = linear(t, x, "self_attn.qkv_proj", hidden, width, bias=spec.query_bias)
    tokens = x.numel // hidden
    if spec.projection not in {Projection.FUSED_SPLIT, Projection.FUSED_SLICED}:
        return _split_per_head(t, fused, spec.projection, spec.num_heads)
    sizes = (tokens * query_size, tokens * kv_size, tokens * kv_size)
    if spec.projection is Projection.FUSED_SLICED:
        query, key, value = (t.slice(fused, size) for size in sizes)
    else:
        query, key, value = t.split(fused, *sizes)
    return query, key, value


CODEGEN_BLOCKS = 4
"""Groups of heads that CodeGen's fused projection lays out one after another; with one head in each
nothing needs to be copied (``CodeGenAttention.forward``, ``mp_num``)."""


def _split_per_head(
    t: Tape, fused: Tensor, projection: Projection, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Thirds of every head's columns; all are views, except where ``reshape`` has to copy."""
    third = fused.numel // 3
    if projection is Projection.FUSED_SELECTED:
        return t.slice(fused, third), t.slice(fused, third), t.slice(fused, third)
    if projection is Projection.FUSED_COPIED and num_heads > CODEGEN_BLOCKS:
        query, value, key = (t.contiguous(part) for part in t.split(fused, third, third, third))
        t.touch(fused)
        return query, key, value
    # The view's gradient is joined head by head, then copied back into rows.
    query, key, value = t.split(t.slice(fused, fused.numel), third, third, third)
    return query, key, value


def feed_forward(
    t: Tape, x: Tensor, spec: FeedForwardSpec, hidden_size: int, name: str = "mlp"
) -> Tensor:
    """Up, activation (times the gate), down."""
    inner = spec.intermediate_size
    halves = x
    if spec.gated:
        middle, halves = _gated(t, x, spec, hidden_size, name)
    else:
        up = linear(t, x, f"{name}.up_proj", hidden_size, inner, bias=spec.bias)
        middle = _activated(t, up, spec.activation, name)
        t.touch(up)
    if spec.inline:
        t.segment.unmade.add(name)
    inside = f"{name}.dropout_inside" if spec.dropout_module else ""
    middle = dropout(t, middle, spec.activation_dropout, module=inside)
    if spec.output_cast:
        middle = t.cast(middle, t.compute)
    out = linear(t, middle, f"{name}.down_proj", inner, hidden_size, bias=spec.bias)
    if not spec.inline:
        t.touch(x)
    if spec.fused_gate_up:
        t.touch(halves)
    return out


def _activated(t: Tape, x: Tensor, kind: Activation, name: str) -> Tensor:
    if kind is Activation.XIELU:
        from memplan.graph.xielu import xielu  # only for Apertus

        return xielu(t, x, f"{name}.act_fn")
    return activation_module(t, x, kind, f"{name}.act_fn")


def _gated(
    t: Tape, x: Tensor, spec: FeedForwardSpec, hidden_size: int, name: str
) -> tuple[Tensor, Tensor]:
    """The gated product, and the gate."""
    inner = spec.intermediate_size
    if spec.fused_gate_up:
        both = linear(t, x, f"{name}.gate_up_proj", hidden_size, 2 * inner, bias=spec.bias)
        gate, up = t.split(both, both.numel // 2, both.numel // 2)
    else:
        gate = linear(t, x, f"{name}.gate_proj", hidden_size, inner, bias=spec.bias)
        up = None
    if t.kernels.feed_forward is FeedForwardKernel.FUSED:
        up = up or linear(t, x, f"{name}.up_proj", hidden_size, inner, bias=spec.bias)
        return fused_gate(t, gate, up), gate
    active = activation_module(t, gate, spec.activation, f"{name}.act_fn")
    up = up or linear(t, x, f"{name}.up_proj", hidden_size, inner, bias=spec.bias)
    return t.mul(active, up), gate


def fused_gate(t: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Liger's ``silu(gate) * up``: keeps gate and up, and writes their gradients over them."""
    out = t.tensor(gate.numel, gate.dtype)
    t.record(
        "fused_gate", (gate, up), (out,), saves=(gate, up),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return out


DIRECT_FORMS = frozenset({AttentionForm.DIRECT, AttentionForm.DIRECT_ALIBI})
"""Attention whose class calls torch's functions itself."""


def decoder_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """One layer, with its norms where its placement says."""
    spec = layer.attention
    if isinstance(spec, AttentionSpec) and spec.form in DIRECT_FORMS:
        from memplan.graph.direct_attention import direct_layer  # only for Falcon

        return direct_layer(t, x, layer, spec, context)
    placement = layer.placement
    if placement is NormPlacement.PRE:
        return pre_norm_layer(t, x, layer, context)
    if placement is NormPlacement.POST:
        return post_norm_layer(t, x, layer, context)
    if placement is NormPlacement.SANDWICH:
        return sandwich_layer(t, x, layer, context)
    if placement is NormPlacement.OUTPUT:
        return output_norm_layer(t, x, layer, context)
    if placement in (NormPlacement.SINGLE, NormPlacement.NONE):
        from memplan.graph.token_mixers import single_part_layer, unnormed_layer  # hybrids

        write = single_part_layer if placement is NormPlacement.SINGLE else unnormed_layer
        return write(t, x, layer, context)
    return parallel_layer(t, x, layer, context)


def feed_forward_of(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """The layer's dense network or mixture of experts."""
    if isinstance(layer.feed_forward, FeedForwardSpec):
        return feed_forward(t, x, layer.feed_forward, context.hidden_size)
    from memplan.graph.token_mixers import other_network  # only for rarer models

    return other_network(t, x, layer.feed_forward, context)


def pre_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """GPT-2's and Llama's order: norm, attention, sum; norm, feed-forward, sum."""
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "input_layernorm", hidden) if layer.attention_norm else x
    if layer.names_normed:
        t.linger(normed)
    attended = self_attention(t, normed, layer.attention, context)
    attended = attention_dropout(t, attended, layer)
    middle = add_residual(t, normed if layer.residual_normed else x, attended, layer)
    t.touch(*context.attention_frame)
    context.attention_frame = ()
    if layer.names_attended:
        t.linger(attended)
    named = layer.names_attended and not layer.unnamed_norms
    if named:
        t.touch(normed)
    normed = norm(t, middle, layer.norm, "post_attention_layernorm", hidden)
    fed = feed_forward_of(t, normed, layer, context)
    multiplied = t.segment.operations[-1].inputs[0]
    fed = feed_forward_dropout(t, fed, layer)
    if layer.dropout_inside:
        t.touch(normed)
    out = add_residual(t, normed if layer.residual_normed else middle, fed, layer)
    if layer.sums_inside:
        t.touch(multiplied, fed, normed)
    t.touch(middle)
    if named:
        t.touch(normed)
    return out


def attention_dropout(t: Tape, x: Tensor, layer: LayerSpec) -> Tensor:
    """Dropout on what attention returns."""
    is_module = layer.dropout_modules and not layer.feed_forward_dropout_only
    module = "self_attn.dropout" if is_module else ""
    return dropout(t, x, layer.attention_output_dropout, module=module)


def feed_forward_dropout(t: Tape, x: Tensor, layer: LayerSpec) -> Tensor:
    """Dropout on what the feed-forward network returns."""
    is_module = layer.dropout_modules and not layer.attention_dropout_only
    module = "mlp.dropout" if is_module else ""
    return dropout(t, x, layer.feed_forward_output_dropout, module=module)


def add_residual(t: Tape, x: Tensor, added: Tensor, layer: LayerSpec) -> Tensor:
    """The residual sum; Granite and MiniCPM multiply what is added by a constant."""
    if layer.residual_weighted:
        out = t.add(t.scale(x), t.scale(added))
        t.touch(added)
        return out
    if not layer.residual_scaled:
        return t.add(x, added)
    out = t.add(x, t.scale(added))
    t.touch(added)
    return out


def post_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """BERT's order: attention, sum, norm; feed-forward, sum, norm."""
    hidden = context.hidden_size
    attended = self_attention(t, x, layer.attention, context)
    if layer.names_attended:
        t.linger(attended)
    attended = attention_dropout(t, attended, layer)
    middle = norm(t, t.add(attended, x), layer.norm, "self_attn_layer_norm", hidden)
    t.touch(attended, *context.attention_frame)
    context.attention_frame = ()
    fed = feed_forward_of(t, middle, layer, context)
    multiplied = t.segment.operations[-1].inputs[0]
    fed = feed_forward_dropout(t, fed, layer)
    out = norm(t, t.add(fed, middle), layer.norm, "final_layer_norm", hidden)
    if not layer.names_attended:
        t.touch(fed)
    if isinstance(layer.attention, AttentionSpec) and layer.attention.output_apart:
        # ``feed_forward_chunk`` calls one module for each half, and holds what is between them.
        t.touch(multiplied)
    t.linger(middle)
    return out


def sandwich_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Gemma 2's: a norm before and after attention, and before and after the feed-forward."""
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    attended = self_attention(t, normed, layer.attention, context)
    attended = norm(t, attended, layer.norm, "post_attention_layernorm", hidden)
    middle = add_residual(t, x, attended, layer)
    normed = norm(t, middle, layer.norm, "pre_feedforward_layernorm", hidden)
    fed = feed_forward_of(t, normed, layer, context)
    fed = norm(t, fed, layer.norm, "post_feedforward_layernorm", hidden)
    return add_residual(t, middle, fed, layer)


def output_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """OLMo 2's: norms on the outputs only, before each sum."""
    hidden = context.hidden_size
    attended = self_attention(t, x, layer.attention, context)
    middle = t.add(x, norm(t, attended, layer.norm, "post_attention_layernorm", hidden))
    fed = feed_forward_of(t, middle, layer, context)
    return t.add(middle, norm(t, fed, layer.norm, "post_feedforward_layernorm", hidden))


def parallel_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Attention and feed-forward side by side on the same input (GPT-NeoX, Phi, Cohere)."""
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    attended = self_attention(t, normed, layer.attention, context)
    attended = attention_dropout(t, attended, layer)
    if layer.placement is NormPlacement.PARALLEL:
        normed = norm(t, x, layer.norm, "post_attention_layernorm", hidden)
    fed = feed_forward_of(t, normed, layer, context)
    fed = feed_forward_dropout(t, fed, layer)
    first, second = (x, fed) if layer.residual_first else (fed, x)
    out = t.add(t.add(first, attended), second)
    t.touch(attended, fed)
    if layer.placement is NormPlacement.PARALLEL_SHARED:
        t.touch(normed)
    return out
