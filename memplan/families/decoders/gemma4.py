"""Gemma 4's text models (``modeling_gemma4.py``, transformers 5.23)."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.decoders.hybrids import Hybrid, read_hybrid
from memplan.families.decoders.text_decoders import FULL, gated_network, listed_kinds, per_token
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, LayerVectorsSpec, NormPlacement, OwnVectorSpec
from memplan.model.mixtures import BesideDenseSpec, MixtureSpec, Normalization, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.shared_keys import KeySource, SharedKeysSpec
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS_POWER)
PERIOD = 6
"""Every how many layers one has no window, unless ``layer_types`` says."""
GLOBAL_HEAD = 512
"""Size of a head in those layers (``Gemma4TextConfig``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of Gemma 4's text type."""
    model = read_hybrid(reader, request, GEMMA4)
    stack = model.stacks[0]
    assert stack.embedding is not None
    embedding = replace(stack.embedding, layer_vectors=_layer_vectors(reader))
    return replace(model, stacks=(replace(stack, embedding=embedding),))


def _kinds(reader: ConfigReader) -> list[str]:
    """With or without a window, and where its keys and values are from.

    The last layers read those of earlier ones: of the last of their kind before them.
    """
    kinds = listed_kinds(reader, lambda index: (index + 1) % PERIOD == 0)
    kinds[-1] = FULL
    reading = reader.integer("num_kv_shared_layers", minimum=0)
    if reading >= len(kinds):
        error = reader.fail("num_kv_shared_layers", f"{reading} of {len(kinds)} layers")
        raise error
    if not reading:
        return [f"{kind} {KeySource.OWN.value}" for kind in kinds]
    first = len(kinds) - reading
    missing = set(kinds) - set(kinds[:first])
    if missing:
        error = reader.fail(
            "num_kv_shared_layers", f"{reading}: no {missing.pop()} layer is left to read from"
        )
        raise error
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    sources = [
        KeySource.EARLIER if number >= first
        else KeySource.HANDED_ON if last[kind] == number
        else KeySource.OWN
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    return [f"{kind} {source.value}" for kind, source in zip(kinds, sources, strict=True)]


def _layer(reader: ConfigReader, kind: str) -> LayerSpec:
    mask, _, named = kind.partition(" ")
    source = KeySource(named)
    wide = source is KeySource.EARLIER and reader.flag("use_double_wide_mlp")
    dense = gated_network(reader, times=2 if wide else 1)
    own = reader.integer("hidden_size_per_layer_input", minimum=0)
    return LayerSpec(
        attention=_attention(reader, source, full=mask == FULL),
        feed_forward=_beside_dense(reader, dense) if reader.flag("enable_moe_block") else dense,
        norm=NORM,
        placement=NormPlacement.SANDWICH,
        own_vector=OwnVectorSpec(width=own, activation=dense.activation) if own else None,
        buffer_scaled=True,
    )


def _attention(reader: ConfigReader, source: KeySource, *, full: bool) -> SharedKeysSpec:
    heads, head_size, narrow = _heads(reader, full=full)
    reader.divide("num_attention_heads", heads, "num_key_value_heads", narrow)
    bias = reader.flag("attention_bias")
    scores = AttentionSpec(
        num_heads=heads,
        num_kv_heads=narrow,
        head_dim=head_size,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        rotary=RotarySpec(dim=head_size),
        sliding_window=None if full else reader.integer("sliding_window"),
        dropout=reader.number("attention_dropout"),
    )
    return SharedKeysSpec(
        scores=scores,
        norm=NORM,
        source=source,
        values_from_keys=full and reader.flag("attention_k_eq_v"),
    )


def _heads(reader: ConfigReader, *, full: bool) -> tuple[int, int, int]:
    """Query heads, their size, key/value heads."""
    heads, narrow = reader.integer("num_attention_heads"), reader.integer("num_key_value_heads")
    if not full:
        return heads, reader.integer("head_dim"), narrow
    own = _override(reader)
    head_size = own.integer("head_dim", default=reader.integer(
        "global_head_dim", default=GLOBAL_HEAD
    ))  # fmt: skip
    if reader.flag("attention_k_eq_v"):
        narrow = reader.integer("num_global_key_value_heads", default=narrow)
    return heads, head_size, own.integer("num_key_value_heads", default=narrow)


def _override(reader: ConfigReader) -> ConfigReader:
    """What a file saved by transformers 5 says of each layer without a window."""
    layers = reader.mapping("per_layer_config") or {}
    found = next((each for each in layers.values() if isinstance(each, Mapping)), {})
    return reader.nested(found, f"{reader.path}per_layer_config.")


def _beside_dense(reader: ConfigReader, dense: FeedForwardSpec) -> BesideDenseSpec:
    """Experts beside the dense network."""
    experts = reader.integer("num_experts")
    mixture = MixtureSpec(
        num_experts=experts,
        num_experts_per_token=per_token(reader, "top_k_experts", experts),
        expert=FeedForwardSpec(
            intermediate_size=reader.integer("moe_intermediate_size"),
            activation=read_activation(reader, "hidden_activation"),
            gated=True,
        ),
        router=RouterSpec(
            normalization=Normalization.IN_PLACE,
            input_norm=replace(NORM, weight=False),
            expert_scales=True,
        ),
    )
    return BesideDenseSpec(dense=dense, mixture=mixture, norm=NORM)


def _layer_vectors(reader: ConfigReader) -> LayerVectorsSpec | None:
    """The token table that holds a vector for every layer."""
    own = reader.integer("hidden_size_per_layer_input", minimum=0)
    if not own:
        return None
    return LayerVectorsSpec(
        num_rows=reader.integer("vocab_size_per_layer_input"),
        num_layers=reader.layers("num_hidden_layers"),
        width=own,
        norm=NORM,
    )


GEMMA4 = Hybrid(
    kinds=_kinds,
    layer=_layer,
    embedding_scaled=True,
    softcap_key="final_logit_softcapping",
    final_norm=NORM,
    mixed_masks=True,
    local_rotary=True,
)
