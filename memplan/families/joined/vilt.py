"""ViLT: one transformer over a text's tokens and a picture's patches (``modeling_vilt.py`` of transformers)."""

from dataclasses import replace

from memplan.families.classes import BARE, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.bert import bert_embeddings
from memplan.families.towers.layers import encoder_attention, tower_activation
from memplan.families.towers.parts import transformer_layer
from memplan.families.towers.sizes import pair
from memplan.families.towers.vit import num_patches, patch_projection
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.blends import SummedBody, WordsBody, WordsPatchesBody
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.pooling import ClassifierBody, PoolerBody
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody
from memplan.model.towers.patches import PatchesBody
from memplan.model.towers.texts import OutputBody, TypedTokensBody

RETRIEVAL = "ForImageAndTextRetrieval"
TWO_IMAGES = "ForImagesAndTextClassification"
QUESTIONS = "ForQuestionAnswering"
TOKENS = "ForTokenClassification"
MASKED_TEXT = "ForMaskedLM"
NAMES = LayerNames(output="o_proj", first_norm="layer_norm2", second_norm="layer_norm1")
"""Norms by the order in which they are declared."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Its config ties the output matrix whatever the file says (``ViltConfig.__post_init__``)."""
    size = reader.integer("hidden_size")

    def declare(table: ParameterTable, ending: str) -> None:
        with table.block("embed", body=_inputs(reader, size)):
            table.parameter("embeddings", "cls_token", 1, 1, size)
            table.parameter("embeddings", "position_embeddings", 1, num_patches(reader) + 1, size)
            bert_embeddings(table, reader)
            patch_projection(table, reader, size)
            kinds = reader.integer("modality_type_vocab_size")
            table.embedding("modality_embeddings", kinds, size)
        body = _layer(reader, size)
        with table.block("layers", count=reader.layers("num_hidden_layers"), body=body):
            bias = reader.flag("qkv_bias", default=True)
            inner = reader.integer("intermediate_size")
            transformer_layer(table, size, inner, qkv_bias=bias)
        with table.block("norm", body=_ending(ending, size)):
            table.norm("layernorm", size)
            if ending != TOKENS:
                table.linear("pooler.dense", size, size)
        _head(table, reader, request, ending)

    model = whole_model(
        reader, request,
        (MASKED_TEXT, BARE, RETRIEVAL, TWO_IMAGES, QUESTIONS, TOKENS), declare,
        hidden_size=size, vocab_size=reader.integer("vocab_size"),
        context_length=reader.integer("max_position_embeddings"),
        tied=True,
    )  # fmt: skip
    return replace(model, eager_attention_only=True)


def _inputs(reader: ConfigReader, size: int) -> WordsPatchesBody:
    dropout = reader.number("hidden_dropout_prob", default=0.0)
    positions = reader.integer("max_position_embeddings")
    return WordsPatchesBody(
        words=TypedTokensBody(
                size=size, num_positions=positions, sums_in_place=True, dropout=dropout
            ),
        patches=PatchesBody(
            size=size, channels=reader.integer("num_channels"), image=pair(reader, "image_size"),
            patch=pair(reader, "patch_size"), projection="patch_embeddings",
            tokens=("embeddings.cls_token",), dropout=dropout,
        ),
        positions="embeddings.position_embeddings", kinds="modality_embeddings",
    )  # fmt: skip


def _layer(reader: ConfigReader, size: int) -> LayerBody:
    attention = encoder_attention(
        reader, size, bias=reader.flag("qkv_bias", default=True), fp32_softmax=False,
        dropout=reader.number("attention_probs_dropout_prob", default=0.0),
    )  # fmt: skip
    return LayerBody(
        size=size, inner_size=reader.integer("intermediate_size"),
        attention=replace(attention, names_weights=False),
        activation=tower_activation(reader, "hidden_act"), names=NAMES,
        dropout=reader.number("hidden_dropout_prob", default=0.0),
    )  # fmt: skip


def _ending(ending: str, size: int) -> TowerBody | None:
    """The last norm, and the first token's vector where the task reads it."""
    norm = NormBody(module="layernorm", size=size)
    pooler = PoolerBody(
        size=size, linear="pooler.dense", outputs=size,
        activation=Activation.TANH,
    )  # fmt: skip
    if ending in (TOKENS, MASKED_TEXT):
        # Of masked text the pooler runs, too, and serves nothing; it is small.
        return ChainBody(parts=(norm, WordsBody(size=size)))
    if ending == BARE:
        return ChainBody(parts=(norm, pooler, SummedBody()))
    return None if ending == TWO_IMAGES else ChainBody(parts=(norm, pooler))


def _head(table: ParameterTable, reader: ConfigReader, request: ReadRequest, ending: str) -> None:
    size, labels = reader.integer("hidden_size"), request.labels(reader)
    match ending:
        case "ForImageAndTextRetrieval":
            rank = LinearBody(module="rank_output", inputs=size, outputs=1)
            with table.block("head", body=ChainBody(parts=(rank, SummedBody()))):
                table.linear("rank_output", size, 1)
        case "ForTokenClassification":
            classes = OutputBody(size=size, rows=labels, table="", module="classifier", bias=True)
            with table.block("head", body=classes):
                table.linear("classifier", size, labels)
        case "ForQuestionAnswering":
            _answers(table, size, 2 * size, labels)
        case "ForImagesAndTextClassification":
            images = reader.integer("num_images", default=1)
            with table.block("head"):
                _perceptron(table, size * images, size * images, labels)
        case "ForMaskedLM":
            _words(table, reader, size)
        case _:
            pass


def _perceptron(table: ParameterTable, inputs: int, inner: int, labels: int) -> None:
    table.linear("classifier.0", inputs, inner)
    table.norm("classifier.1", inner)
    table.linear("classifier.3", inner, labels)


def _answers(table: ParameterTable, size: int, inner: int, labels: int) -> None:
    body = ChainBody(
        parts=(
            LinearBody(module="classifier.0", inputs=size, outputs=inner),
            NormBody(module="classifier.1", size=inner),
            ActivationBody(activation=Activation.GELU),
            ClassifierBody(module="classifier.3", inputs=inner, classes=labels),
        )
    )
    with table.block("head", body=body):
        _perceptron(table, size, inner, labels)


def _words(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    vocab_size = reader.integer("vocab_size")
    transform = ChainBody(
        parts=(
            LinearBody(module="mlm_score.transform.dense", inputs=size, outputs=size),
            ActivationBody(activation=tower_activation(reader, "hidden_act")),
            NormBody(module="mlm_score.transform.norm", size=size),
        )
    )
    with table.block("transform", body=transform):
        table.linear("mlm_score.transform.dense", size, size)
        table.norm("mlm_score.transform.norm", size)
    output = OutputBody(
        size=size, rows=vocab_size, table="word_embeddings.weight", module="mlm_score.decoder",
        bias=True,
    )  # fmt: skip
    with table.block("head", body=output):
        table.tied("mlm_score.decoder", "word_embeddings.weight", vocab_size, size)
        table.parameter("mlm_score.decoder", "bias", vocab_size)
