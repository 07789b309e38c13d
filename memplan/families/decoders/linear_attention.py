"""Decoders that mix linear attention or short convolutions with attention.

Kimi Linear (a delta rule with a decay for each channel), MiniMax (lightning attention), LFM2's mixture
(convolutions).
"""

from dataclasses import replace

from memplan.families.decoders.hybrids import (
    Hybrid,
    gated_network,
    layer_kinds,
    plain_attention,
    read_hybrid,
)
from memplan.families.decoders.latents import Latent, read_latent_attention
from memplan.families.decoders.mixtures import DEEPSEEK_ROUTER, Mixture, read_mixture
from memplan.families.llama import Variation, read_activation
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.mixers import (
    ChannelDecaySpec,
    LightningSpec,
    ShortConvolutionSpec,
    TokenMixer,
)
from memplan.model.mixtures import MixtureSpec, Normalization, RouterScore, RouterSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``LINEAR_ATTENTION``."""
    model = read_hybrid(reader, request, LINEAR_ATTENTION[request.model_type])
    tied = reader.raw("tie_embedding")
    if tied is None or "tie_embedding" not in reader.config:
        return model
    return replace(model, head=replace(model.head, tied=reader.flag("tie_embedding")))


# -- Kimi Linear ----------------------------------------------------------------------------------

_KIMI_MIXTURE = Mixture(router=DEEPSEEK_ROUTER, shared_count="n_shared_experts")


def _kimi_kinds(reader: ConfigReader) -> list[str]:
    types = layer_kinds(reader, "layer_types") or _kimi_types(reader)
    networks = reader.texts("mlp_layer_types")
    if not networks:
        num_dense = reader.integer("first_k_dense_replace", default=1, minimum=0)
        networks = ["dense" if number < num_dense else "sparse" for number in range(len(types))]
    if len(networks) < len(types):
        error = reader.fail("mlp_layer_types", f"names {len(networks)} layers of {len(types)}")
        raise error
    return [f"{mixer} {network}" for mixer, network in zip(types, networks, strict=False)]


def _kimi_types(reader: ConfigReader) -> list[str]:
    """What ``linear_attn_config`` lists, from 1 on, or full attention in every fourth layer."""
    nested = reader.mapping("linear_attn_config") or {}
    count = reader.layers("num_hidden_layers")
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or linear is None:
        attends = set(range(4, count, 4))
    else:
        attends, mixes = _places(reader, full), _places(reader, linear)
        if attends & mixes or attends | mixes != set(range(count)):
            problem = f"full_attn_layers and kda_layers must name each of {count} layers once"
            error = reader.fail("linear_attn_config", problem)
            raise error
    return [
        "full_attention" if number in attends else "linear_attention" for number in range(count)
    ]


def _places(reader: ConfigReader, named: object) -> set[int]:
    """Layers that are counted from 1 on."""
    if not isinstance(named, list) or not all(isinstance(each, int) for each in named):
        problem = "full_attn_layers and kda_layers must be lists of whole numbers"
        error = reader.fail("linear_attn_config", problem)
        raise error
    return {each - 1 for each in named}


def _kimi_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    name, network = kind.split()
    mixer: TokenMixer = _channel_decay(reader)
    if name == "full_attention":
        mixer = replace(read_latent_attention(reader, Latent()), rotates=False)
    return LayerSpec(
        attention=mixer,
        feed_forward=read_mixture(reader, _KIMI_MIXTURE)
        if network == "sparse"
        else gated_network(reader),
        norm=NORM,
    )


def _channel_decay(reader: ConfigReader) -> ChannelDecaySpec:
    """Sizes of ``linear_attn_config`` come before the class's own names."""
    nested = reader.mapping("linear_attn_config")
    sizes = reader.nested(nested or {}, "linear_attn_config.")
    return ChannelDecaySpec(
        num_heads=sizes.optional_integer("num_heads") or reader.integer("linear_num_heads"),
        head_dim=sizes.optional_integer("head_dim") or reader.integer("linear_head_dim"),
        kernel_size=sizes.optional_integer("short_conv_kernel_size")
        or reader.integer("linear_conv_kernel_dim"),
        activation=read_activation(reader, "hidden_act"),
    )


# -- MiniMax -------------------------------------------------------------------------------------


def _minimax_kinds(reader: ConfigReader) -> list[str]:
    named = layer_kinds(reader, "layer_types")
    if named:
        return named
    count = reader.layers("num_hidden_layers")
    return ["linear_attention" if number % 2 else "full_attention" for number in range(count)]


_MINIMAX_MIXTURE = Mixture(
    router=RouterSpec(normalization=Normalization.IN_PLACE),
    normalizes=True,
    expert_size="intermediate_size",
    jitter="router_jitter_noise",
)


def _minimax_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    attention = plain_attention(reader)
    mixer: AttentionSpec | LightningSpec = replace(
        attention,
        rotary=RotarySpec(dim=attention.head_dim),
        sliding_window=reader.optional_integer("sliding_window"),
    )
    if kind == "linear_attention":
        mixer = LightningSpec(
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            block_size=reader.integer("block_size"),
            activation=read_activation(reader, "hidden_act"),
            norm=NORM,
        )
    return LayerSpec(
        attention=mixer,
        feed_forward=read_mixture(reader, _MINIMAX_MIXTURE),
        norm=NORM,
        residual_normed=True,
        residual_weighted=True,
    )


# -- LFM2 ----------------------------------------------------------------------------------------


def _lfm_types(reader: ConfigReader) -> list[str]:
    named = layer_kinds(reader, "layer_types")
    if named:
        return named
    count = reader.layers("num_hidden_layers")
    attends = set(reader.integers("full_attn_idxs")) or set(range(count))
    return ["full_attention" if number in attends else "conv" for number in range(count)]


def _lfm_sparse_kinds(reader: ConfigReader) -> list[str]:
    num_dense = reader.integer("num_dense_layers", minimum=0)
    return [
        f"{name} {'dense' if number < num_dense else 'sparse'}"
        for number, name in enumerate(_lfm_types(reader))
    ]


_LFM_MIXTURE = Mixture(
    router=RouterSpec(
        score=RouterScore.SIGMOID,
        fp32_logits=False,
        correction=True,
        normalization=Normalization.COPY,
        scaled=True,
    )
)


def _lfm_sparse_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    if kind.endswith("sparse"):
        return _lfm_layer(reader, kind, read_mixture(reader, _LFM_MIXTURE))
    return _lfm_layer(reader, kind, _network(reader.integer("intermediate_size")))


def _network(size: int) -> FeedForwardSpec:
    return FeedForwardSpec(intermediate_size=size, activation=Activation.SILU, gated=True)


def _lfm_layer(
    reader: ConfigReader, kind: str, network: FeedForwardSpec | MixtureSpec
) -> LayerSpec:
    attention: AttentionSpec | ShortConvolutionSpec
    if kind.startswith("conv"):
        attention = ShortConvolutionSpec(
            kernel_size=reader.integer("conv_L_cache"), bias=reader.flag("conv_bias")
        )
    else:
        variation = Variation(
            qkv_bias=False, output_bias=False, query_key_norm=NormKind.RMS, norm_at_once=True
        )
        attention = plain_attention(reader, variation)
        attention = replace(attention, rotary=RotarySpec(dim=attention.head_dim), dropout=0.0)
    return LayerSpec(attention=attention, feed_forward=network, norm=NORM)


LINEAR_ATTENTION: dict[str, Hybrid] = {
    "kimi_linear": Hybrid(kinds=_kimi_kinds, layer=_kimi_layer),
    "minimax": Hybrid(kinds=_minimax_kinds, layer=_minimax_layer),
    "lfm2_moe": Hybrid(kinds=_lfm_sparse_kinds, layer=_lfm_sparse_layer),
}
