"""Image models of convolutions: ResNet, EfficientNet, ConvNeXt."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.networks.convnext import convnext_sizes, convnext_tower
from memplan.families.towers.networks.efficientnet import efficientnet_tower
from memplan.families.towers.networks.resnet import (
    resnet_sizes,
    resnet_tower,
    whole_mean,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.gridded.nets import (
    DropoutBody,
    Window,
    WindowBody,
)

IMAGES = "ForImageClassification"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _resnet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = resnet_sizes(reader)[-1]

    def declare(table: ParameterTable, ending: str) -> None:
        resnet_tower(table, "model", reader)
        with table.block("model.pooler", body=whole_mean()):
            pass
        if ending == IMAGES:
            classifier(table, "classifier", size, request.labels(reader), known=True)

    return _images(reader, request, declare, size)


def _images(
    reader: ConfigReader,
    request: ReadRequest,
    declare: Callable[[ParameterTable, str], None],
    size: int,
) -> ModelSpec:
    """A classifier of images, which have no sequence: one position."""
    model = whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=size, context_length=1
    )
    return replace(model)


def _convnext(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = convnext_sizes(reader)[-1]

    def declare(table: ParameterTable, ending: str) -> None:
        normalized = request.model_type == "convnextv2"
        convnext_tower(table, "model", reader, normalized=normalized)
        mean = PoolerBody(pooling=TowerPooling.MEAN, size=size, norm="layernorm")
        with table.block("norm", body=mean):
            table.norm("layernorm", size)
        if ending == IMAGES:
            labels = request.labels(reader)
            classifier(table, "classifier", size, labels, known=True)

    return _images(reader, request, declare, size)


def _efficientnet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = reader.integer("hidden_dim")
    kind = reader.choice(
        "pooling_type", reader.text("pooling_type", default="mean"), ("mean", "max")
    )
    pooled = WindowBody(window=Window.MEAN if kind == "mean" else Window.GREATEST)

    def declare(table: ParameterTable, ending: str) -> None:
        efficientnet_tower(table, "model", reader)
        with table.block("model.pooler", body=pooled):
            pass
        if ending == IMAGES:
            drop = DropoutBody(probability=reader.number("dropout_rate", default=0.5))
            with table.block("model.dropout", body=drop):
                pass
            classifier(table, "classifier", size, request.labels(reader), known=True)

    return _images(reader, request, declare, size)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "resnet": _resnet,
    "convnext": _convnext,
    "convnextv2": _convnext,
    "efficientnet": _efficientnet,
}
