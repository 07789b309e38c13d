"""Which block writes a layer's part where it is neither plain attention nor a dense network."""

from memplan.graph.blocks import StackContext, add_residual, feed_forward_of, self_attention
from memplan.graph.operations import norm
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.latent import LatentAttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.mixers import (
    NOTHING,
    CountedSpec,
    DeltaRuleSpec,
    LightningSpec,
    OtherMixer,
    ShortConvolutionSpec,
)
from memplan.model.mixtures import MixtureSpec


def other_mixer(
    t: Tape, x: Tensor, spec: LatentAttentionSpec | OtherMixer, context: StackContext
) -> Tensor:
    """What mixes the tokens where plain attention does not."""
    if isinstance(spec, LatentAttentionSpec):
        from memplan.graph.latent_attention import latent_attention  # only for DeepSeek's kin

        return latent_attention(t, x, spec, context)
    if isinstance(spec, ShortConvolutionSpec):
        from memplan.graph.convolution import short_convolution  # only for LFM2

        return short_convolution(t, x, spec, context)
    if isinstance(spec, LightningSpec):
        from memplan.graph.lightning_attention import lightning_attention  # only for MiniMax

        return lightning_attention(t, x, spec, context)
    if isinstance(spec, DeltaRuleSpec):
        from memplan.graph.delta_rule import delta_rule  # only for Qwen3-Next and Qwen3.5

        return delta_rule(t, x, spec, context)
    from memplan.graph.counted import counted_part  # only for what is not written down

    return counted_part(t, x, spec, context.hidden_size)


def other_network(
    t: Tape, x: Tensor, spec: MixtureSpec | CountedSpec, context: StackContext
) -> Tensor:
    """A mixture of experts, or a network that is only counted."""
    if isinstance(spec, MixtureSpec):
        from memplan.graph.mixture import mixture  # only for mixtures of experts

        return mixture(t, x, spec, context.hidden_size)
    from memplan.graph.counted import counted_part  # only for what is not written down

    return counted_part(t, x, spec, context.hidden_size)


def single_part_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """A norm, the layer's only part, the sum (Mamba, Nemotron-H)."""
    normed = norm(t, x, layer.norm, "norm", context.hidden_size)
    if layer.feed_forward == NOTHING:
        return add_residual(t, x, self_attention(t, normed, layer.attention, context), layer)
    return add_residual(t, x, feed_forward_of(t, normed, layer, context), layer)


def unnormed_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Parts that count norms of their own, each with its sum."""
    for part in (layer.attention, layer.feed_forward):
        if part == NOTHING:
            continue
        if part is layer.attention:
            added = self_attention(t, x, layer.attention, context)
        else:
            added = feed_forward_of(t, x, layer, context)
        x = add_residual(t, x, added, layer)
    return x
