"""Text models of one multimodal type each.

Llama 4, Llama 3.2 Vision, Muse Glimmer and Kosmos-2.5: decoders whose attention or experts work as
no other family's do. Kosmos-2.5's layers are counted, all others written down (``modeling_*.py`` of each
type, transformers 5.23).
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.decoders.hybrids import Hybrid, counted, read_hybrid
from memplan.families.llama import Variation, read_activation, read_attention
from memplan.families.request import ReadRequest
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.parts import attention
from memplan.model.attention import OutputGate, QueryScaling, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.mixers import MemoryAttentionSpec
from memplan.model.mixtures import EveryTokenSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterBlock, ParameterTable
from memplan.model.spec import ModelSpec

RMS = NormSpec(kind=NormKind.RMS)
WEIGHTLESS = NormSpec(kind=NormKind.RMS, weight=False)
LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
FULL, SLIDING = "full_attention", "sliding_attention"
CROSS, DENSE, SPARSE = "cross", "dense", "sparse"

MLLAMA_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
"""Where ``MllamaTextConfig`` has cross attention unless told otherwise."""
MLLAMA_IMAGE_ROWS = 8
"""Rows for image tokens beside the vocabulary's (``MllamaTextModel``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``DECODERS``."""
    model = read_hybrid(reader, request, DECODERS[request.model_type])
    beside = BESIDE.get(request.model_type)
    if beside is None:
        return model
    return replace(model, tables=beside(reader))


def listed_kinds(reader: ConfigReader, full: Callable[[int], bool]) -> list[str]:
    """``layer_types``, or what the class makes: ``full`` says which layers have no window."""
    count = reader.layers("num_hidden_layers")
    listed = reader.texts("layer_types")
    if not listed:
        return [FULL if full(index) else SLIDING for index in range(count)]
    if len(listed) != count:
        error = reader.fail("layer_types", f"names {len(listed)} layers of {count}")
        raise error
    for kind in listed:
        reader.choice("layer_types", kind, (FULL, SLIDING))
    return listed


def gated_network(
    reader: ConfigReader, key: str = "intermediate_size", times: int = 1
) -> FeedForwardSpec:
    """Llama's network, under the keys that these types have, so many times as wide."""
    return FeedForwardSpec(
        intermediate_size=times * reader.integer(key),
        activation=read_activation(reader, "hidden_act", "hidden_activation"),
        gated=True,
        bias=reader.flag("mlp_bias"),
    )


def per_token(reader: ConfigReader, key: str, num_experts: int) -> int:
    """Experts of a token; an error where there are not so many."""
    found = reader.integer(key)
    if found > num_experts:
        raise reader.fail(key, f"{found} of {num_experts} experts")
    return found


# -- Llama 4 -------------------------------------------------------------------------------------


def _llama4_kinds(reader: ConfigReader) -> list[str]:
    """With or without positions, and so with or without chunks; with or without experts."""
    count = reader.layers("num_hidden_layers")
    every = reader.integer("interleave_moe_layer_step")
    listed = reader.raw("moe_layers") is not None
    sparse = set(reader.integers("moe_layers") if listed else range(every - 1, count, every))
    period = reader.integer("no_rope_layer_interval")
    turned = reader.integers("no_rope_layers") or [
        int((number + 1) % period != 0) for number in range(count)
    ]
    if len(turned) < count:
        error = reader.fail("no_rope_layers", f"names {len(turned)} layers of {count}")
        raise error
    return [
        f"{SPARSE if number in sparse else DENSE} {SLIDING if turned[number] else FULL}"
        for number in range(count)
    ]


def _llama4_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    network, reach = kind.split()
    spec = read_attention(reader, Variation(), reader.integer("hidden_size"))
    if reach == SLIDING:
        spec = replace(
            spec,
            rotary=RotarySpec(dim=spec.head_dim, complex_numbers=True),
            sliding_window=reader.integer("attention_chunk_size"),
            query_key_norm=WEIGHTLESS if reader.flag("use_qk_norm") else None,
            query_key_norm_last=True,
            fp32_softmax=False,
        )
    else:
        scaled = reader.flag("attn_temperature_tuning")
        spec = replace(
            spec, rotary=None, query_scaled_by_position=scaled, position_factors_upcast=True,
            fp32_softmax=False,
        )  # fmt: skip
    sparse = network == SPARSE
    return LayerSpec(
        attention=spec,
        feed_forward=_llama4_experts(reader)
        if sparse
        else gated_network(reader, "intermediate_size_mlp"),
        norm=RMS,
    )


def _llama4_experts(reader: ConfigReader) -> EveryTokenSpec:
    """Every expert multiplies every token; a shared one stands beside them."""
    experts = reader.integer("num_local_experts")
    return EveryTokenSpec(
        num_experts=experts,
        num_chosen=per_token(reader, "num_experts_per_tok", experts),
        expert=replace(gated_network(reader), bias=False),
    )


# -- Llama 3.2 Vision ----------------------------------------------------------------------------


def _mllama_kinds(reader: ConfigReader) -> list[str]:
    crossing = set(reader.integers("cross_attention_layers") or MLLAMA_CROSS_LAYERS)
    count = reader.layers("num_hidden_layers")
    return [CROSS if number in crossing else FULL for number in range(count)]


def _mllama_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Llama's layer, or one that attends to pictures alone."""
    bare = Variation(qkv_bias=False, output_bias=False)
    spec = read_attention(reader, bare, reader.integer("hidden_size"))
    network = replace(gated_network(reader), bias=False)
    if kind != CROSS:
        return LayerSpec(attention=spec, feed_forward=network, norm=RMS)
    scores = replace(spec, rotary=None, causal=False)
    return LayerSpec(
        attention=MemoryAttentionSpec(scores=scores, norm=RMS),
        feed_forward=network,
        norm=RMS,
        placement=NormPlacement.CROSSING,
    )


# -- Muse Glimmer --------------------------------------------------------------------------------


TURNED, PLAIN = "turned", "plain"
MUSE_NORM = NormSpec(kind=NormKind.RMS_POWER, weight=False)
MUSE_PERIOD = 4
"""Every how many layers, counted from the last, one has no window (``MuseGlimmerTextConfig``)."""


def _muse_kinds(reader: ConfigReader) -> list[str]:
    """With or without a window, with or without positions."""
    count = reader.layers("num_hidden_layers")
    kinds = listed_kinds(reader, lambda index: (count - 1 - index) % MUSE_PERIOD == 0)
    named = reader.raw("layer_rope_theta")
    if not isinstance(named, list):
        return [f"{kind} {TURNED if kind == SLIDING else PLAIN}" for kind in kinds]
    if len(named) < count:
        error = reader.fail("layer_rope_theta", f"names {len(named)} layers of {count}")
        raise error
    places = [TURNED if theta else PLAIN for theta in named]
    return [f"{kind} {place}" for kind, place in zip(kinds, places, strict=False)]


def _muse_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Weightless norms on queries and keys; layers whose theta is 0 know no positions."""
    mask, _, place = kind.partition(" ")
    window = reader.optional_integer("sliding_window") if mask == SLIDING else None
    spec = read_attention(reader, Variation(), reader.integer("hidden_size"))
    return LayerSpec(
        attention=replace(
            spec,
            sliding_window=window,
            output_gate=OutputGate.SIGMOID_BEHIND,
            query_key_norm=MUSE_NORM,
            query_scaling=QueryScaling.NORMED,
            rotary=spec.rotary if place == TURNED else None,
        ),
        feed_forward=replace(gated_network(reader), bias=False),
        norm=NormSpec(kind=NormKind.RMS_GEMMA),
        placement=NormPlacement.SANDWICH,
    )


# -- Kosmos-2.5 ----------------------------------------------------------------------------------


def _kosmos_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """BART's layer before its norms, with one more inside the feed-forward network."""
    size, inner = reader.integer("embed_dim"), reader.integer("ffn_dim")

    def declare(table: ParameterTable) -> None:
        perceptron(table, "ffn", size, inner)
        table.norm("ffn.ffn_layernorm", inner)

    return LayerSpec(
        attention=counted(lambda table: attention(table, "self_attn", size)),
        feed_forward=counted(declare),
        norm=LAYER_NORM,
    )


def _kosmos_beside(reader: ConfigReader) -> tuple[ParameterBlock, ...]:
    """Tokens of text and of images are told apart."""
    table = ParameterTable()
    with table.block("segment_embed"):
        table.embedding("segment_emb", 2, reader.integer("embed_dim"))
    return table.blocks()


def _alike(reader: ConfigReader) -> list[str]:
    return [FULL] * reader.layers("num_hidden_layers")


DECODERS: dict[str, Hybrid] = {
    "llama4_text": Hybrid(
        kinds=_llama4_kinds,
        layer=_llama4_layer,
        chunked_mask=True,
    ),
    "mllama_text_model": Hybrid(
        kinds=_mllama_kinds,
        layer=_mllama_layer,
        upcasts_logits=True,
        extra_rows=lambda _: MLLAMA_IMAGE_ROWS,
    ),
    "muse_glimmer_text": Hybrid(
        kinds=_muse_kinds,
        layer=_muse_layer,
        softcap_key="final_logit_softcapping",
        embedding_norm=MUSE_NORM,
        final_norm=NormSpec(kind=NormKind.RMS_POWER),
        mixed_masks=True,
    ),
    "kosmos_2_5_text_model": Hybrid(
        kinds=_alike,
        layer=_kosmos_layer,
        left_out="its layers",
        embedding_scaled=True,
        final_norm=LAYER_NORM,
    ),
}

BESIDE: dict[str, Callable[[ConfigReader], tuple[ParameterBlock, ...]]] = {
    "kosmos_2_5_text_model": _kosmos_beside,
}
"""What stands beside a type's stack."""
