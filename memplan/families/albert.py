"""ALBERT: BERT whose layers share their weights."""

from dataclasses import replace

from memplan.families.encoders import (
    LAYER_NORM,
    TASKS,
    Variation,
    encoder_attention,
    encoder_embedding,
    encoder_head,
    encoder_model,
)
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.layers import (
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ALBERT: groups of layers that share their parameters, behind a projection."""
    key = "inner_group_num"
    if reader.integer(key) != 1:
        raise reader.fail(key, "only 1 layer a group is supported")
    variation = Variation(head_activation=None, classifier_dropout_key="classifier_dropout_prob")
    hidden_size = reader.integer("hidden_size")
    embedding_size = reader.integer("embedding_size")
    layer = LayerSpec(
        attention=encoder_attention(reader, variation, hidden_size),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=reader.number("hidden_dropout_prob"),
        attention_dropout_only=True,
    )
    embedding = encoder_embedding(reader, variation, embedding_size)
    stack = StackSpec(
        name="encoder",
        runs=tuple(
            LayerRun(count=count, layer=layer, shared=True) for count in _group_sizes(reader)
        ),
        embedding=replace(embedding, projection_in_encoder=True),
        final_norm=None,
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size,
        head=encoder_head(reader, variation, embedding_size),
        context_length=reader.integer("max_position_embeddings"),
        recomputes=False,
    )  # fmt: skip


def _group_sizes(reader: ConfigReader) -> list[int]:
    """How many layers run with each group's parameters (``AlbertTransformer.forward``)."""
    num_layers = reader.layers("num_hidden_layers")
    num_groups = reader.integer("num_hidden_groups", maximum=num_layers)
    sizes = [0] * num_groups
    for index in range(num_layers):
        sizes[int(index / (num_layers / num_groups))] += 1
    return sizes
