"""DeBERTa and DeBERTa-v2: BERT's layers with scores of relative distances."""

from dataclasses import replace

from memplan.families.encoders import (
    LAYER_NORM,
    TASKS,
    Variation,
    encoder_attention,
    encoder_head,
    encoder_model,
    require_flag,
)
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.distances import DistanceSpec
from memplan.model.heads import ClassifierSpec
from memplan.model.layers import (
    ConvolutionSpec,
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """DeBERTa: attention to contents and distances, layer norms written out."""
    require_flag(reader, "legacy", value=True, problem="the other head is not supported")
    require_flag(reader, "talking_head", value=False, problem="is not supported")
    hidden_size = reader.integer("hidden_size")
    second = request.model_type == "deberta-v2"
    norm = LAYER_NORM if second else NormSpec(kind=NormKind.LAYER_DIVIDED, bias=True)
    convolution = _convolution(reader, hidden_size) if second else None
    dropout = reader.number("hidden_dropout_prob")
    variation = Variation(pooler_tasks=(), head_activation=None)
    layer = LayerSpec(
        attention=replace(
            encoder_attention(reader, variation, hidden_size),
            distances=_bucketed(reader, dropout) if second else _distances(reader, dropout),
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
        ),
        norm=norm,
        placement=NormPlacement.POST,
        dropout=dropout,
    )
    positions = reader.integer("max_position_embeddings")
    stack = StackSpec(
        name="encoder",
        runs=_runs(layer, reader.layers("num_hidden_layers"), first_apart=convolution is not None),
        convolution=convolution,
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            num_positions=positions if reader.flag("position_biased_input") else 0,
            num_token_types=reader.integer("type_vocab_size", minimum=0),
            zeros_for_positions=True,
            padding_product=True,
            own_module=True,
            norm=norm,
            dropout=dropout,
        ),
        final_norm=None,
    )
    head = replace(
        encoder_head(reader, variation, hidden_size),
        classifier=ClassifierSpec(
            dense=read_activation(reader, "pooler_hidden_act"),
            first_dropout=reader.number("pooler_dropout"),
            dropout=reader.number("cls_dropout", default=dropout),
            token_dropout=dropout,
        ),
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size, head=head,
        context_length=positions, eager_attention_only=True,
    )  # fmt: skip


def _convolution(reader: ConfigReader, hidden_size: int) -> ConvolutionSpec | None:
    """DeBERTa-v2's beside the first layer; its tanh and single group are ``ConvLayer``'s own."""
    kernel_size = reader.integer("conv_kernel_size", default=0, minimum=0)
    if not kernel_size:
        return None
    groups = reader.integer("conv_groups", default=1)
    reader.divide("hidden_size", hidden_size, "conv_groups", groups)
    activation = Activation.TANH
    if reader.has("conv_act"):
        activation = read_activation(reader, "conv_act")
    return ConvolutionSpec(
        kernel_size=kernel_size,
        groups=groups,
        activation=activation,
        norm=LAYER_NORM,
        dropout=reader.number("hidden_dropout_prob"),
    )


def _runs(layer: LayerSpec, count: int, *, first_apart: bool) -> tuple[LayerRun, ...]:
    if not first_apart or count == 1:
        return (LayerRun(count=count, layer=layer),)
    return LayerRun(count=1, layer=layer), LayerRun(count=count - 1, layer=layer)


def _bucketed(reader: ConfigReader, dropout: float) -> DistanceSpec:
    """DeBERTa-v2's distances, of which far ones share a row."""
    plain = _distances(reader, dropout)
    buckets = reader.optional_integer("position_buckets", minimum=-1) or -1
    if not plain.content_to_position or not plain.position_to_content:
        plain = replace(plain, max_distance=0)
    elif buckets > 0:
        plain = replace(plain, max_distance=buckets)
    normed = "layer_norm" in reader.text("norm_rel_ebd", default="none").lower()
    return replace(
        plain,
        norm=LAYER_NORM if normed else None,
        flat_heads=True,
        log_buckets=buckets > 0,
        shared_projections=reader.flag("share_att_key"),
    )


def _distances(reader: ConfigReader, dropout: float) -> DistanceSpec:
    """Which scores of distances there are; ``pos_att_type`` is a list or joined by bars."""
    if not reader.flag("relative_attention"):
        return DistanceSpec(max_distance=0)
    given = reader.raw("pos_att_type")
    kinds = given.lower().split("|") if isinstance(given, str) else reader.texts("pos_att_type")
    largest = reader.optional_integer("max_relative_positions", minimum=-1) or -1
    return DistanceSpec(
        max_distance=largest if largest > 0 else reader.integer("max_position_embeddings"),
        content_to_position="c2p" in kinds,
        position_to_content="p2c" in kinds,
        dropout=dropout,
    )
