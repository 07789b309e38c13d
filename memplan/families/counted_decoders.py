"""Decoders whose attention or experts are counted, not written down.

Norms, residual sums, embeddings, heads and plain networks are operations; what a class does in a
way of its own is weights.
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.hybrids import (
    Hybrid,
    gated_network,
    plain_attention,
    read_hybrid,
)
from memplan.families.llama import (
    Variation,
    read_activation,
    read_attention,
    read_feed_forward,
)
from memplan.families.request import ReadRequest
from memplan.model.attention import (
    AttentionSpec,
    OutputGate,
    Projection,
    QueryScaling,
    RotarySpec,
)
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.mixers import DifferentialSpec, DynamicMaskSpec
from memplan.model.mixtures import (
    CrossedKeysSpec,
    FullPrecisionExpertsSpec,
    MixtureSpec,
    Normalization,
    RouterScore,
    RouterSpec,
    SortedAttentionSpec,
    SortedExpertsSpec,
)
from memplan.model.networks import Activation, Clamp, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

NORM = NormSpec(kind=NormKind.RMS)
WEIGHT_ONLY_LAYER_NORM = NormSpec(kind=NormKind.LAYER)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``COUNTED``."""
    return read_hybrid(reader, request, COUNTED[request.model_type])


def all_alike(reader: ConfigReader) -> list[str]:
    """Every layer is like the others."""
    return ["layer"] * reader.layers("num_hidden_layers")


# -- DiffLlama -----------------------------------------------------------------------------------


def _diffllama_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Differential attention: two attention calls, their difference scaled by four vectors."""
    spec = plain_attention(reader, Variation())
    spec = replace(spec, rotary=RotarySpec(dim=spec.head_dim), dropout=0.0)
    if spec.num_kv_heads % 2:
        error = reader.fail("num_key_value_heads", f"{spec.num_kv_heads} is odd, must be even")
        raise error

    return LayerSpec(
        attention=DifferentialSpec(scores=spec), feed_forward=gated_network(reader),
        norm=NORM,
    )  # fmt: skip


# -- JetMoE --------------------------------------------------------------------------------------


def _jetmoe_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Experts for queries and output of attention, and for the network."""
    heads, head_dim = reader.integer("num_key_value_heads"), reader.integer("kv_channels")
    experts, active = reader.integer("num_local_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)
    network = SortedExpertsSpec(
        num_experts=experts,
        num_chosen=active,
        intermediate_size=reader.integer("intermediate_size"),
        activation=read_activation(reader, "activation_function"),
    )
    scores = AttentionSpec(
        num_heads=heads * active,
        num_kv_heads=heads,
        head_dim=head_dim,
        rotary=RotarySpec(dim=head_dim),
        dropout=reader.number("attention_dropout"),
    )
    return LayerSpec(
        attention=SortedAttentionSpec(experts=network, scores=scores),
        feed_forward=network,
        norm=NORM,
    )


def check_experts(reader: ConfigReader, key: str, active: int, experts: int) -> None:
    """Refuse a token that would need more experts than there are."""
    if active > experts:
        raise reader.fail(key, f"{active} of {experts} experts")


# -- DBRX ----------------------------------------------------------------------------------------


def _dbrx_layer(reader: ConfigReader, _: str) -> LayerSpec:
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.divide("d_model", hidden_size, "n_heads", num_heads)
    attention = reader.child("attn_config", "dbrx.attn_config")
    network = reader.child("ffn_config", "dbrx.ffn_config")
    heads = attention.integer("kv_n_heads")
    reader.divide("n_heads", num_heads, "kv_n_heads", heads)
    inner = network.integer("ffn_hidden_size")
    experts, active = network.integer("moe_num_experts"), network.integer("moe_top_k")
    check_experts(network, "moe_top_k", active, experts)
    named = network.mapping("ffn_act_fn") or {}
    return LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            projection=Projection.FUSED_SPLIT,
            rotary=RotarySpec(dim=head_dim),
            fused_clamped=attention.raw("clip_qkv") is not None,
            dropout=attention.number("attn_pdrop"),
        ),
        feed_forward=MixtureSpec(
            num_experts=experts,
            num_experts_per_token=active,
            expert=FeedForwardSpec(
                intermediate_size=inner,
                activation=Activation(str(named.get("name", "silu"))),
                gated=True,
            ),
            router=RouterSpec(
                own_dtype=True,
                fp32_logits=False,
                normalization=_dbrx_normalization(network),
                jitter=network.raw("moe_jitter_eps") is not None,
            ),
            in_turn=True,
            separate_stacks=True,
        ),
        norm=WEIGHT_ONLY_LAYER_NORM,
        dropout=reader.number("resid_pdrop"),
    )


def _dbrx_normalization(network: ConfigReader) -> Normalization:
    """``moe_normalize_expert_weights`` is the power of the norm; None leaves them as they are."""
    if "moe_normalize_expert_weights" in network.config:
        power = network.config["moe_normalize_expert_weights"]
        return Normalization.NONE if power is None else Normalization.NORM
    return Normalization.NORM


# -- BitNet --------------------------------------------------------------------------------------


def _bitnet_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Llama's layer with a norm before each sublayer's last matrix."""
    attention = read_attention(reader, Variation(), reader.integer("hidden_size"))
    return LayerSpec(
        attention=replace(attention, inner_norm=NORM),
        feed_forward=replace(read_feed_forward(reader, bias=False), inner_norm=NORM),
        norm=NORM,
    )


# -- Doge ----------------------------------------------------------------------------------------


def _doge_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Attention with a mask that depends on the values, and weighted residuals."""
    spec = plain_attention(reader, Variation(query_key_norm=NormKind.RMS, norm_at_once=True))
    dense = replace(gated_network(reader), bias=reader.flag("mlp_bias"))
    sparse = reader.flag("is_moe")
    if sparse and reader.flag("norm_topk_prob"):
        error = reader.fail(
            "norm_topk_prob",
            "true: DogeCDMoE divides its softmax in place, which fails in backward; set it to false",
        )
        raise error
    return LayerSpec(
        attention=DynamicMaskSpec(
            scores=replace(spec, rotary=RotarySpec(dim=spec.head_dim)),
            kept_keys=reader.integer("keep_window_size"),
            step_bias=reader.flag("attention_bias"),
        ),
        feed_forward=_doge_experts(reader, dense) if sparse else dense,
        norm=NORM,
        dropout=reader.number("hidden_dropout"),
        residual_vectors=True,
    )


def _doge_experts(reader: ConfigReader, dense: FeedForwardSpec) -> CrossedKeysSpec:
    """Experts of one row each, found by two keys whose pairs count them."""
    return CrossedKeysSpec(
        num_experts=reader.integer("num_experts"),
        num_chosen=reader.integer("num_experts_per_tok"),
        dense=dense,
    )


# -- OpenAI's privacy filter ---------------------------------------------------------------------


def _filter_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """gpt-oss's layer looking both ways, with experts that always compute in fp32."""
    spec = plain_attention(reader, Variation())
    experts, active = reader.integer("num_local_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)
    bias = reader.flag("attention_bias")
    attention = replace(
        spec,
        output_bias=bias,
        rotary=RotarySpec(dim=spec.head_dim, halved=True, interleaved=True),
        query_scaling=QueryScaling.BOTH,
        own_eager=True,
        sinks=True,
        sinks_upcast=True,
        causal=False,
        sliding_window=reader.integer("sliding_window"),
    )
    network = FullPrecisionExpertsSpec(
        num_experts=experts,
        num_experts_per_token=active,
        intermediate_size=reader.integer("intermediate_size"),
    )
    return LayerSpec(
        attention=attention,
        feed_forward=network,
        norm=NormSpec(kind=NormKind.RMS_UPCAST),
    )


# -- Step 3.5 ------------------------------------------------------------------------------------

STEP_NORM = NormSpec(kind=NormKind.RMS_GEMMA)
_STEP_FIRST_SPARSE = 3
"""The first layer with experts where the config is silent (``Step3p7TextConfig``)."""


def _step_kinds(reader: ConfigReader) -> list[str]:
    """Which attention and which network; entries for layers that only predict ahead are left."""
    count = reader.layers("num_hidden_layers")
    types = reader.texts("layer_types") or ["full_attention"] * count
    networks = reader.texts("mlp_layer_types") or _step_networks(reader, count)
    for key, found in (("layer_types", types), ("mlp_layer_types", networks)):
        if len(found) < count:
            raise reader.fail(key, f"names {len(found)} layers of {count}")
    return [f"{each} {network}" for each, network in zip(types, networks, strict=False)][:count]


def _step_networks(reader: ConfigReader, count: int) -> list[str]:
    """``moe_layers_enum``, numbers in a list or between commas, or all but the first ones."""
    named = reader.raw("moe_layers_enum")
    sparse = {str(number) for number in range(_STEP_FIRST_SPARSE, count)}
    if isinstance(named, str):
        sparse = {each.strip() for each in named.split(",")}
    elif named is not None:
        sparse = {str(number) for number in reader.integers("moe_layers_enum")}
    return ["sparse" if str(number) in sparse else "dense" for number in range(count)]


def _step_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Grouped queries with norms and a gate for each head; local layers may have other heads."""
    local = kind.startswith("sliding")
    spec = plain_attention(reader, Variation(query_key_norm=NormKind.RMS_GEMMA, norm_at_once=True))
    rotated = int(spec.head_dim * _step_share(reader, local=local))
    attention = replace(
        spec,
        num_heads=_sliding_heads(reader, spec.num_heads) if local else spec.num_heads,
        rotary=RotarySpec(dim=rotated, joined=True),
        output_gate=OutputGate.SIGMOID_PER_HEAD,
        sliding_window=reader.optional_integer("sliding_window") if local else None,
    )
    dense = FeedForwardSpec(
        intermediate_size=reader.integer("intermediate_size"),
        activation=Activation.SILU,
        gated=True,
        bias=reader.flag("mlp_bias"),
        clamp=Clamp.BEHIND,
    )
    sparse = kind.endswith("sparse")
    return LayerSpec(
        attention=attention,
        feed_forward=_step_mixture(reader, dense) if sparse else dense,
        norm=STEP_NORM,
    )


def _step_share(reader: ConfigReader, *, local: bool) -> float:
    """The rotated share of heads, by kind of layer or, of old, by layer."""
    kind = "sliding_attention" if local else "full_attention"
    own = (reader.mapping("rope_parameters") or {}).get(kind)
    if isinstance(own, Mapping):
        share = own.get("partial_rotary_factor", 1.0)
        return float(share) if isinstance(share, int | float) else 1.0
    listed = reader.raw("partial_rotary_factors")
    types = reader.texts("layer_types")
    if isinstance(listed, list) and kind in types and types.index(kind) < len(listed):
        found = listed[types.index(kind)]
        return float(found) if isinstance(found, int | float) else 1.0
    return 1.0


def _step_mixture(reader: ConfigReader, dense: FeedForwardSpec) -> MixtureSpec:
    experts, active = reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)
    inner = reader.integer("moe_intermediate_size")
    return MixtureSpec(
        num_experts=experts,
        num_experts_per_token=active,
        expert=replace(dense, intermediate_size=inner, bias=False),
        router=RouterSpec(
            score=RouterScore.SIGMOID, correction=True, normalization=Normalization.IN_PLACE
        ),
        shared=replace(dense, intermediate_size=reader.integer("share_expert_dim")),
        shared_first=True,
        routed_scaled=True,
        in_turn=True,
    )


def _sliding_heads(reader: ConfigReader, num_heads: int) -> int:
    """Query heads of layers with a window."""
    found = reader.optional_integer("num_sliding_attention_heads")
    if found is not None:
        return found
    other = reader.mapping("attention_other_setting")
    value = other.get("num_attention_heads") if other is not None else None
    return value if isinstance(value, int) else num_heads


COUNTED: dict[str, Hybrid] = {
    "diffllama": Hybrid(kinds=all_alike, layer=_diffllama_layer),
    "jetmoe": Hybrid(kinds=all_alike, layer=_jetmoe_layer, recomputes=False),
    "dbrx": Hybrid(
        kinds=all_alike,
        layer=_dbrx_layer,
        router_loss=True,
        final_norm=WEIGHT_ONLY_LAYER_NORM,
    ),
    "bitnet": Hybrid(kinds=all_alike, layer=_bitnet_layer),
    "doge": Hybrid(kinds=all_alike, layer=_doge_layer, written_mask=True),
    "openai_privacy_filter": Hybrid(
        kinds=all_alike,
        layer=_filter_layer,
        final_norm=NormSpec(kind=NormKind.RMS_UPCAST),
        tasks=(Task.TOKEN_CLASSIFICATION, Task.BASE),
    ),
    "step3p5": Hybrid(
        kinds=_step_kinds,
        layer=_step_layer,
        final_norm=STEP_NORM,
        mixed_masks=True,
        local_rotary=True,
    ),
}
