"""Whole layers: what mixes the tokens, a feed-forward network, and norms where the class has them."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.stack_context import StackContext
from memplan.graph.written.layer_parts import feed_forward_of, mix_tokens, whole_layer
from memplan.model.attention import AttentionSpec
from memplan.model.layers import LayerSpec, NormPlacement


def decoder_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """One layer, with its norms where its placement says."""
    own = whole_layer(t, x, layer, context)
    if own is not None:
        return own
    placement = layer.placement
    if placement is NormPlacement.PRE:
        return pre_norm_layer(t, x, layer, context)
    if placement is NormPlacement.POST:
        return post_norm_layer(t, x, layer, context)
    if placement is NormPlacement.SANDWICH:
        return sandwich_layer(t, x, layer, context)
    if placement is NormPlacement.CROSSING:
        from memplan.graph.written.crossing import crossing_layer  # only for Llama 3.2 Vision

        return crossing_layer(t, x, layer, context)
    return parallel_layer(t, x, layer, context)


def pre_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """GPT-2's and Llama's order: norm, attention, sum; norm, feed-forward, sum."""
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    attended = mix_tokens(t, normed, layer.attention, context)
    attended = attention_dropout(t, attended, layer, context)
    middle = t.add(x, attended)
    t.touch(*context.attention_frame)
    context.attention_frame = ()
    if layer.names_attended:
        t.linger(attended)
    named = layer.names_attended
    if named:
        t.touch(normed)
    normed = norm(t, middle, layer.norm, "post_attention_layernorm", hidden)
    fed = feed_forward_of(t, normed, layer, context)
    activated = _activated(t) if _output_apart(layer) else None
    fed = feed_forward_dropout(t, fed, layer)
    if layer.dropout_inside:
        t.touch(normed)
    out = t.add(middle, fed)
    if activated is not None:
        t.touch(activated)
    t.touch(middle)
    if named:
        t.touch(normed)
    return out


def attention_dropout(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Dropout on what attention returns, inside its module or behind it."""
    is_module = layer.dropout_modules and not layer.feed_forward_dropout_only
    module = "self_attn.dropout" if is_module else ""
    out = dropout(t, x, layer.attention_output_dropout, module=module)
    if layer.dropout_inside:
        t.touch(*context.attention_variables)
    context.attention_variables = ()
    return out


def feed_forward_dropout(t: Tape, x: Tensor, layer: LayerSpec) -> Tensor:
    """Dropout on what the feed-forward network returns."""
    return dropout(t, x, layer.dropout, module="mlp.dropout" if layer.dropout_modules else "")


def post_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """BERT's order: attention, sum, norm; feed-forward, sum, norm."""
    hidden = context.hidden_size
    attended = mix_tokens(t, x, layer.attention, context)
    if layer.names_attended:
        t.linger(attended)
    attended = attention_dropout(t, attended, layer, context)
    middle = norm(t, t.add(attended, x), layer.norm, "self_attn_layer_norm", hidden)
    t.touch(attended, *context.attention_frame)
    context.attention_frame = ()
    fed = feed_forward_of(t, middle, layer, context)
    activated = _activated(t)
    fed = feed_forward_dropout(t, fed, layer)
    added = t.add(fed, middle)
    out = norm(t, added, layer.norm, "final_layer_norm", hidden)
    if not layer.names_attended:
        t.touch(fed)
    if _output_apart(layer):
        t.touch(activated)
    # One statement names what attention returned and its weights, in this order.
    t.segment.lingering.insert(0, middle)
    return out


def _activated(t: Tape) -> Tensor:
    """The network's activations: what its last product is made of, autocast's copy of it left out."""
    kinds = (OperationKind.LINEAR, OperationKind.TO)
    made = (each for each in reversed(t.segment.operations) if each.kind not in kinds)
    return next(made).outputs[0]


def _output_apart(layer: LayerSpec) -> bool:
    """Whether ``feed_forward_chunk`` calls a module for each half, and holds what is between them."""
    mixer = layer.attention
    return isinstance(mixer, AttentionSpec) and mixer.output_apart


def sandwich_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Gemma 2's: a norm before and after attention, and before and after the feed-forward."""
    hidden = context.hidden_size
    vector = None
    if layer.own_vector is not None:
        from memplan.graph.written.layer_vectors import own_vector  # only for Gemma 4

        vector = own_vector(t, context, layer.own_vector)
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    attended = mix_tokens(t, normed, layer.attention, context)
    attended = norm(t, attended, layer.norm, "post_attention_layernorm", hidden)
    middle = t.add(x, attended)
    normed = norm(t, middle, layer.norm, "pre_feedforward_layernorm", hidden)
    context.residual = middle
    fed = feed_forward_of(t, normed, layer, context)
    fed = norm(t, fed, layer.norm, "post_feedforward_layernorm", hidden)
    out = t.add(middle, fed)
    if layer.own_vector is not None and vector is not None:
        from memplan.graph.written.layer_vectors import add_own_vector  # only for Gemma 4

        out = add_own_vector(t, out, vector, layer, layer.own_vector, context)
    return _scaled_in_place(t, out) if layer.buffer_scaled else out


def _scaled_in_place(t: Tape, x: Tensor) -> Tensor:
    """``hidden_states *= self.layer_scalar``, a buffer of one number."""
    number = t.buffer(1, t.options.weights)
    out = t.view(x, x.numel)
    t.record(
        OperationKind.MUL_IN_PLACE, (x, number), (out,), saves=(number,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def parallel_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Attention and feed-forward side by side on the same input (GPT-J, CodeGen)."""
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "input_layernorm", hidden)
    attended = mix_tokens(t, normed, layer.attention, context)
    attended = attention_dropout(t, attended, layer, context)
    fed = feed_forward_of(t, normed, layer, context)
    fed = feed_forward_dropout(t, fed, layer)
    out = t.add(t.add(fed, attended), x)
    t.touch(attended, fed)
    t.touch(normed)
    return out
