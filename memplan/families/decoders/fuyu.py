"""Fuyu, trained on text: Persimmon, and a linear layer for image patches that no text reaches.

Its published configs are flat; newer ones nest Persimmon's keys in ``text_config``
(``FuyuConfig.__post_init__`` of transformers 5.23).
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.decoders.gpt import LAYER_NORM, persimmon_layer
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, StackSpec
from memplan.model.spec import ModelSpec, Task

TEXT_KEYS = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "hidden_act", "qk_layernorm", "hidden_dropout",
    "attention_dropout", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
"""What a flat config says about the text model."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read the text model, then what surrounds it."""
    text = _text_reader(reader, request)
    hidden_size = text.integer("hidden_size")
    patch_size = reader.integer("patch_size")
    layer = persimmon_layer(text, hidden_size)
    assert isinstance(layer.attention, AttentionSpec)
    layer = replace(layer, attention=replace(layer.attention, fills_cache=True))
    stack = StackSpec(
        name="decoder",
        runs=(LayerRun(count=text.layers("num_hidden_layers"), layer=layer),),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            patch_features=patch_size * patch_size * reader.integer("num_channels"),
        ),
        final_norm=LAYER_NORM,
    )
    tasks = Task.CAUSAL_LM, Task.BASE, Task.SEQUENCE_CLASSIFICATION
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(text, replace(request, model_type="persimmon"), *tasks),
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=text.integer("max_position_embeddings", default=2048),
        stacks=(stack,),
        head=HeadSpec(tied=reader.flag("tie_word_embeddings")),
        num_labels=request.labels(text),
        checkpoint_dtype=checkpoint_dtype(reader),
        source=reader.source,
    )


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
