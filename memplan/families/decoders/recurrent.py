"""Decoders with recurrent layers and a shape of their own: RWKV, RecurrentGemma, Zamba."""

from dataclasses import replace

from memplan.families.decoders.hybrids import (
    Hybrid,
    plain_attention,
    read_hybrid,
)
from memplan.families.llama import Variation, read_activation
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.mixers import (
    ChannelMixingSpec,
    GatedRecurrenceSpec,
    TimeMixingSpec,
)
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)
LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
GEMMA_NORM = NormSpec(kind=NormKind.RMS_GEMMA)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``RECURRENT``."""
    return read_hybrid(reader, request, RECURRENT[request.model_type])


# -- RWKV ----------------------------------------------------------------------------------------


def _rwkv_kinds(reader: ConfigReader) -> list[str]:
    return ["first"] + ["later"] * (reader.layers("num_hidden_layers") - 1)


def _rwkv_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Time mixing and channel mixing; the first layer owns a norm of the embeddings."""
    hidden_size = reader.integer("hidden_size")
    width = reader.integer("attention_hidden_size", default=hidden_size)
    inner = reader.integer("intermediate_size", default=4 * hidden_size)

    return LayerSpec(
        attention=TimeMixingSpec(width=width),
        feed_forward=ChannelMixingSpec(intermediate_size=inner),
        norm=LAYER_NORM,
        entry_norm=kind == "first",
    )


# -- RecurrentGemma ------------------------------------------------------------------------------


def _griffin_kinds(reader: ConfigReader) -> list[str]:
    """``block_types``, repeated as often as there are layers."""
    pattern = reader.texts("block_types")
    if not pattern:
        error = reader.fail("block_types", "names no kind of layer")
        raise error
    count = reader.layers("num_hidden_layers")
    return [pattern[number % len(pattern)] for number in range(count)]


def _griffin_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    half = reader.divide("intermediate_size", reader.integer("intermediate_size"), "halves", 2)
    return LayerSpec(
        attention=_griffin_mixer(reader, kind),
        feed_forward=FeedForwardSpec(
            intermediate_size=half,
            activation=read_activation(reader, "hidden_activation"),
            gated=True,
            bias=True,
        ),
        norm=GEMMA_NORM,
    )


def _griffin_mixer(reader: ConfigReader, kind: str) -> AttentionSpec | GatedRecurrenceSpec:
    hidden_size = reader.integer("hidden_size")
    if reader.choice("block_types", kind, ("attention", "recurrent")) == "attention":
        bias = reader.flag("attention_bias")
        variation = Variation(qkv_bias=bias, output_bias=True)
        spec = plain_attention(reader, variation, rotary_share=0.5)
        rotary = replace(spec.rotary, own_tables=True) if spec.rotary is not None else None
        window = reader.integer("attention_window_size")
        return replace(spec, sliding_window=window, rotary=rotary)
    width = reader.integer("lru_width", default=hidden_size)
    num_heads = reader.integer("num_attention_heads")
    reader.divide("lru_width", width, "num_attention_heads", num_heads)
    return GatedRecurrenceSpec(
        width=width,
        num_heads=num_heads,
        kernel=reader.integer("conv1d_width"),
        activation=read_activation(reader, "hidden_activation"),
    )


RECURRENT: dict[str, Hybrid] = {
    "rwkv": Hybrid(
        kinds=_rwkv_kinds,
        layer=_rwkv_layer,
        final_norm=LAYER_NORM,
    ),
    "recurrent_gemma": Hybrid(
        kinds=_griffin_kinds,
        layer=_griffin_layer,
        embedding_scaled=True,
        unscaled_held=True,
        softcap_key="logits_soft_cap",
        final_norm=GEMMA_NORM,
    ),
}
