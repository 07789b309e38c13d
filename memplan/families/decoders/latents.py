"""Decoders with DeepSeek's latent attention."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.decoders.mixtures import (
    DEEPSEEK_ROUTER,
    Mixture,
    read_mixture,
    typed_or_first_dense,
)
from memplan.families.llama import decoder_model, join_runs, read_activation
from memplan.families.request import ReadRequest
from memplan.fast_dataclass import dataclass
from memplan.model.attention import RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.latent import IndexerSpec, LatentAttentionSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """What one type's class fixes."""

    mixture: Mixture | None = None
    """The layers' experts; None: another module reads them."""
    paired: bool = False
    """The rotary embedding takes neighbouring pairs where ``rope_interleave`` does not say no."""
    indexer: bool = False
    """Attention is sparse, and its mask is always written out."""
    shares_indexer: Callable[[ConfigReader, int], bool] | None = None
    """Which layers attend to what an earlier one chose; None: none."""


def _shares_indexer(reader: ConfigReader, number: int) -> bool:
    """GLM-5's ``indexer_types``, a pattern of letters, or every so many layers."""
    types = reader.texts("indexer_types")
    pattern = reader.raw("index_topk_pattern")
    if not types and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif not types:
        types = reader.texts("index_topk_pattern")
    if types:
        if number >= len(types):
            error = reader.fail("indexer_types", f"names {len(types)} layers, needs more")
            raise error
        return reader.choice("indexer_types", types[number], ("full", "shared")) == "shared"
    every = reader.integer("index_topk_freq", default=1, minimum=0) or 1
    offset = reader.integer("index_skip_topk_offset", default=2, minimum=0)
    return max(number - offset + 1, 0) % every != 0


LATENTS: dict[str, Latent] = {
    "deepseek_v32": Latent(
        mixture=Mixture(
            router=DEEPSEEK_ROUTER, shared_count="n_shared_experts", dense=typed_or_first_dense
        ),
        paired=True,
        indexer=True,
    ),
    "glm_moe_dsa": Latent(
        mixture=Mixture(
            router=DEEPSEEK_ROUTER, shared_count="n_shared_experts", dense=typed_or_first_dense
        ),
        paired=True,
        indexer=True,
        shares_indexer=_shares_indexer,
    ),
}


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``LATENTS``."""
    kind = LATENTS[request.model_type]
    hidden_size = reader.integer("hidden_size")
    stack = StackSpec(
        name="decoder",
        runs=join_runs(_layers(reader, kind)),
        embedding=EmbeddingSpec(embedding_size=hidden_size),
        final_norm=NORM,
        written_mask=kind.indexer,
    )
    return decoder_model(reader, request, stack, hidden_size=hidden_size)


def _shares(reader: ConfigReader, kind: Latent, number: int) -> bool:
    return kind.shares_indexer is not None and kind.shares_indexer(reader, number)


def _layers(reader: ConfigReader, kind: Latent) -> list[LayerSpec]:
    attention = read_latent_attention(reader, kind)
    dense = LayerSpec(
        attention=attention,
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            gated=True,
        ),
        norm=NORM,
    )
    count = reader.layers("num_hidden_layers")
    mixture = kind.mixture
    assert mixture is not None
    sparse = LayerSpec(attention=attention, feed_forward=read_mixture(reader, mixture), norm=NORM)
    is_dense = mixture.dense or (lambda *_: False)
    layers = [dense if is_dense(reader, number) else sparse for number in range(count)]
    unindexed = replace(attention, indexer=None)
    if layers and _shares(reader, kind, 0):
        error = reader.fail("indexer_types", "the first layer has no earlier one's choice to share")
        raise error
    return [
        replace(layer, attention=unindexed) if _shares(reader, kind, number) else layer
        for number, layer in enumerate(layers)
    ]


def read_latent_attention(reader: ConfigReader, kind: Latent) -> LatentAttentionSpec:
    """Widths of the narrow vectors and of the heads."""
    return LatentAttentionSpec(
        num_heads=reader.integer("num_attention_heads"),
        query_rank=reader.optional_integer("q_lora_rank") if _has_rank(reader) else None,
        key_value_rank=reader.integer("kv_lora_rank"),
        plain_head_dim=reader.integer("qk_nope_head_dim"),
        value_head_dim=_value_head_dim(reader),
        rotary=RotarySpec(
            dim=reader.integer("qk_rope_head_dim"),
            paired=kind.paired and reader.flag("rope_interleave", default=True),
        ),
        norm=NORM,
        bias=reader.flag("attention_bias"),
        dropout=reader.number("attention_dropout"),
        indexer=_indexer(reader) if kind.indexer else None,
        hands_on=kind.shares_indexer is not None,
    )


def _indexer(reader: ConfigReader) -> IndexerSpec:
    if not _has_rank(reader):
        error = reader.fail("q_lora_rank", "is null, but the indexer reads that narrow vector")
        raise error
    return IndexerSpec(
        num_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        rotary_dim=reader.integer("qk_rope_head_dim"),
        top_k=reader.integer("index_topk"),
    )


def _has_rank(reader: ConfigReader) -> bool:
    """A null in the config overrules the class's default (DeepSeek-V2-Lite)."""
    return "q_lora_rank" not in reader.config or reader.config["q_lora_rank"] is not None


def _value_head_dim(reader: ConfigReader) -> int:
    value = reader.optional_integer("v_head_dim")
    if value is not None:
        return value
    heads = reader.integer("num_attention_heads")
    return reader.divide("hidden_size", reader.integer("hidden_size"), "num_attention_heads", heads)
