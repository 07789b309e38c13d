"""Fuyu, trained on text: Persimmon, and a linear layer for image patches that no text reaches.

Its published configs are flat; newer ones nest Persimmon's keys in ``text_config``
(``FuyuConfig.__post_init__`` of transformers 5.23).
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families import gpt
from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.spec import ModelSpec

TEXT_KEYS = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "hidden_act", "qk_layernorm", "hidden_dropout",
    "attention_dropout", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
"""What a flat config says about the text model."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read the text model, then what surrounds it."""
    text = gpt.read(_text_reader(reader, request), replace(request, model_type="persimmon"))
    stack = text.stacks[0]
    if stack.embedding is None:
        return text
    patch_size = reader.integer("patch_size")
    features = patch_size * patch_size * reader.integer("num_channels")
    embedding = replace(stack.embedding, patch_features=features)
    runs = tuple(replace(run, layer=_caching(run.layer)) for run in stack.runs)
    return replace(
        text,
        family=request.model_type,
        stacks=(replace(stack, embedding=embedding, runs=runs),),
        head=replace(text.head, tied=reader.flag("tie_word_embeddings")),
        checkpoint_dtype=checkpoint_dtype(reader),
    )


def _caching(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.attention, AttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, fills_cache=True))


def _text_reader(reader: ConfigReader, request: ReadRequest) -> ConfigReader:
    nested = reader.mapping("text_config")
    config = nested
    if config is None:
        config = {key: reader.config[key] for key in TEXT_KEYS if key in reader.config}
    row = request.all_defaults.get("persimmon", {})
    defaults = row.get("defaults")
    return reader.nested(
        config,
        "" if nested is None else "text_config.",
        model_type="persimmon",
        defaults=defaults if isinstance(defaults, Mapping) else {},
    )
