"""Which block writes down each of a layer's two parts: what mixes its tokens, and its network.

The rarer blocks are imported where a model has one: reading a model should not wait for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.graph.feed_forward import feed_forward
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    BlockSparseSpec,
    FutureTokensSpec,
    LocalBlocksSpec,
    RelativeSpec,
    SlidingChunksSpec,
)
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock
from memplan.training.kernels import WHOLE, ScanKernel

if TYPE_CHECKING:
    from memplan.graph.stack_context import StackContext
    from memplan.graph.tape import Tape
    from memplan.graph.tensors import Tensor
    from memplan.model.latent import LatentAttentionSpec
    from memplan.model.layers import LayerSpec
    from memplan.model.mixers import CountedSpec, OtherMixer, OtherNetwork, TokenMixer
    from memplan.model.mixtures import MixtureSpec


def mix_tokens(t: Tape, x: Tensor, spec: TokenMixer, context: StackContext) -> Tensor:
    """Attention, or what stands in its place; a rank that has a share of the sequences gathers them."""
    group = t.options.tensor_parallel
    t.block = LayerBlock.ATTENTION
    if group is None or not group.sequence:
        out = _mixer(t, x, spec, context)
    else:
        from memplan.graph.tensor_parallel import gather_sequence, note_parts_of_sums  # only then

        declared = len(t.segment.parameters)
        out = _mixer(t, gather_sequence(t, group, x), spec, context)
        note_parts_of_sums(t, declared)
        t.touch(x)
    t.block = LayerBlock.NETWORK
    return out


def _mixer(t: Tape, x: Tensor, spec: TokenMixer, context: StackContext) -> Tensor:
    if not isinstance(spec, AttentionSpec):
        return _other_mixer(t, x, spec, context)
    if spec.form is AttentionForm.SEGMENTS:
        from memplan.graph.cpmant import segment_attention  # only for CPM-Ant

        return segment_attention(t, x, spec, context)
    if spec.form is not AttentionForm.INTERFACE:
        from memplan.graph.attention.older_classes import own_attention  # only for older classes

        return own_attention(t, x, spec, context)
    if spec.distances is not None:
        from memplan.graph.attention.disentangled import (  # only for DeBERTa
            disentangled_attention,
        )

        return disentangled_attention(t, x, spec, context)
    from memplan.graph.attention.self_attention import self_attention  # not for two stacks

    return self_attention(t, x, spec, context)


def _other_mixer(
    t: Tape, x: Tensor, spec: LatentAttentionSpec | OtherMixer, context: StackContext
) -> Tensor:
    from memplan.model.compressed import CompressedAttentionSpec  # only for rarer models
    from memplan.model.latent import LatentAttentionSpec
    from memplan.model.mixers import (
        ChannelsFirstSpec,
        ConvolvedHeadsSpec,
        DeltaRuleSpec,
        DifferentialSpec,
        DynamicMaskSpec,
        FourierSpec,
        LightningSpec,
        Mamba2Spec,
        MambaSpec,
        MemoryAttentionSpec,
        ShortConvolutionSpec,
        SideBySideSpec,
        TimeMixingSpec,
    )
    from memplan.model.mixtures import SortedAttentionSpec
    from memplan.model.shared_keys import SharedKeysSpec

    if isinstance(spec, LatentAttentionSpec):
        from memplan.graph.attention.latent import latent_attention  # only for DeepSeek's kin

        return latent_attention(t, x, spec, context)
    if isinstance(spec, CompressedAttentionSpec):
        from memplan.graph.attention.compressed import compressed_attention  # only for DeepSeek-V4

        return compressed_attention(t, x, spec, context)
    if isinstance(spec, DynamicMaskSpec):
        from memplan.graph.attention.dynamic_mask import dynamic_mask_attention  # only for Doge

        return dynamic_mask_attention(t, x, spec, context)
    if isinstance(spec, DifferentialSpec):
        from memplan.graph.attention.differential import (  # only for DiffLlama
            differential_attention,
        )

        return differential_attention(t, x, spec, context)
    if isinstance(spec, SortedAttentionSpec):
        from memplan.graph.experts.sorted_lists import sorted_attention  # only for JetMoE

        return sorted_attention(t, x, spec, context)
    if isinstance(spec, SharedKeysSpec):
        from memplan.graph.attention.shared_keys import shared_keys_attention  # only for Gemma 4

        return shared_keys_attention(t, x, spec, context)
    if isinstance(spec, ShortConvolutionSpec):
        from memplan.graph.mixers.convolution import short_convolution  # only for LFM2

        t.block = LayerBlock.MIXER
        return short_convolution(t, x, spec, context)
    if isinstance(spec, LightningSpec):
        from memplan.graph.mixers.lightning_attention import (  # only for MiniMax
            lightning_attention,
        )

        return lightning_attention(t, x, spec, context)
    if isinstance(spec, DeltaRuleSpec):
        from memplan.graph.mixers.delta_rule import delta_rule  # only for Qwen3-Next and Qwen3.5

        return delta_rule(t, x, spec, context)
    if isinstance(spec, SlidingChunksSpec):
        from memplan.graph.attention.sliding_chunks import sliding_chunks  # only for Longformer

        return sliding_chunks(t, x, spec, context)
    if isinstance(spec, FourierSpec):
        from memplan.graph.mixers.fourier import fourier_transform  # only for FNet

        return fourier_transform(t, x)
    if isinstance(spec, ChannelsFirstSpec):
        from memplan.graph.mixers.channels_first import (  # only for SqueezeBERT
            channels_first_attention,
        )

        return channels_first_attention(t, x, spec, context)
    if isinstance(spec, ConvolvedHeadsSpec):
        from memplan.graph.mixers.convolved_heads import convolved_heads  # only for ConvBERT

        return convolved_heads(t, x, spec, context)
    if isinstance(spec, RelativeSpec):
        from memplan.graph.attention.relative import relative_attention  # only for XLNet

        return relative_attention(t, x, spec, context)
    if isinstance(spec, FutureTokensSpec):
        from memplan.graph.attention.future_tokens import future_tokens  # only for ProphetNet

        return future_tokens(t, x, spec, context)
    if isinstance(spec, BlockSparseSpec):
        from memplan.graph.attention.block_sparse import block_sparse  # only for BigBird

        return block_sparse(t, x, spec, context)
    if isinstance(spec, LocalBlocksSpec):
        from memplan.graph.attention.local_blocks import local_blocks  # only for LongT5

        return local_blocks(t, x, spec, context)
    if isinstance(spec, TimeMixingSpec):
        from memplan.graph.mixers.rwkv import time_mixing  # only for RWKV

        t.block = LayerBlock.MIXER
        return time_mixing(t, x, spec, context)
    if isinstance(spec, MambaSpec):
        from memplan.graph.mixers.mamba import mamba_mixer  # only for Mamba and its hybrids

        t.block = LayerBlock.MIXER
        if t.kernels.scan is ScanKernel.PACKAGE and spec.is_one_function:
            from memplan.graph.mixers.scan_kernels import mamba_in_kernels

            return mamba_in_kernels(t, x, spec, context)
        return mamba_mixer(t, x, spec, context)
    if isinstance(spec, Mamba2Spec):
        from memplan.graph.mixers.mamba2 import mamba2_mixer  # only for Mamba-2 and its hybrids

        t.block = LayerBlock.MIXER
        return mamba2_mixer(t, x, spec, context)
    if isinstance(spec, SideBySideSpec):
        from memplan.graph.mixers.side_by_side import side_by_side  # only for Falcon-H1

        return side_by_side(t, x, spec, context)
    assert not isinstance(spec, MemoryAttentionSpec)  # such layers are written down whole
    t.block = LayerBlock.MIXER
    return _counted(t, x, spec, context)


def feed_forward_of(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """The layer's dense network, mixture of experts, or network that is only counted."""
    group = t.options.tensor_parallel
    if group is None or not group.sequence:
        return _network(t, x, layer, context)
    from memplan.graph.tensor_parallel import (  # only then
        add_up,
        gather_sequence,
        note_parts_of_sums,
    )

    declared = len(t.segment.parameters)
    if t.options.expert_parallel is not None and not isinstance(
        layer.feed_forward, FeedForwardSpec
    ):
        # Experts are sent a rank's own tokens (torchtitan 0.3.0, models/common/moe_sharding.py).
        out = _network(t, x, layer, context)
        note_parts_of_sums(t, declared)
        return out
    out = _network(t, gather_sequence(t, group, x), layer, context)
    note_parts_of_sums(t, declared)
    t.touch(x)
    return out if isinstance(layer.feed_forward, FeedForwardSpec) else add_up(t, group, out)


def _network(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    spec = layer.feed_forward
    if isinstance(spec, FeedForwardSpec):
        if t.kernels.mlp_tiles != WHOLE:
            from memplan.graph.tiles import tiled_network  # only then

            return tiled_network(t, x, spec, context.hidden_size)
        return feed_forward(t, x, spec, context.hidden_size)
    return _other_network(t, x, spec, context)


def _other_network(
    t: Tape, x: Tensor, spec: MixtureSpec | OtherNetwork, context: StackContext
) -> Tensor:
    from memplan.model.mixers import (  # only for rarer models
        ChannelMixingSpec,
        ChannelsFirstNetworkSpec,
        GroupedNetworkSpec,
    )
    from memplan.model.mixtures import (
        BesideDenseSpec,
        CapacityMixtureSpec,
        CrossedKeysSpec,
        EveryTokenSpec,
        MixtureSpec,
        SortedExpertsSpec,
    )

    if isinstance(spec, MixtureSpec):
        from memplan.graph.experts.mixture import mixture  # only for mixtures of experts

        return mixture(t, x, spec, context.hidden_size)
    if isinstance(spec, CrossedKeysSpec):
        from memplan.graph.experts.crossed_keys import crossed_keys  # only for Doge

        return crossed_keys(t, x, spec, context.hidden_size)
    if isinstance(spec, SortedExpertsSpec):
        from memplan.graph.experts.sorted_lists import sorted_experts  # only for JetMoE

        return sorted_experts(t, x, spec, context.hidden_size)
    if isinstance(spec, BesideDenseSpec):
        from memplan.graph.experts.beside_dense import beside_dense  # only for Gemma 4

        return beside_dense(t, x, spec, context)
    if isinstance(spec, EveryTokenSpec):
        from memplan.graph.experts.every_token import every_token  # only for Llama 4

        return every_token(t, x, spec, context.hidden_size)
    if isinstance(spec, ChannelsFirstNetworkSpec):
        from memplan.graph.mixers.channels_first import (  # only for SqueezeBERT
            channels_first_network,
        )

        return channels_first_network(t, x, spec, context)
    if isinstance(spec, GroupedNetworkSpec):
        from memplan.graph.mixers.convolved_heads import grouped_network  # only for ConvBERT

        return grouped_network(t, x, spec, context)
    if isinstance(spec, CapacityMixtureSpec):
        from memplan.graph.experts.capacity import (
            capacity_mixture,  # only for Switch Transformers
        )

        return capacity_mixture(t, x, spec, context.hidden_size, context.batch)
    if isinstance(spec, ChannelMixingSpec):
        from memplan.graph.mixers.rwkv import channel_mixing  # only for RWKV

        return channel_mixing(t, x, spec, context.hidden_size)
    return _counted(t, x, spec, context)


def _counted(t: Tape, x: Tensor, spec: CountedSpec, context: StackContext) -> Tensor:
    from memplan.graph.counted import counted_part  # only for what is not written down

    return counted_part(t, x, spec, context.hidden_size)
