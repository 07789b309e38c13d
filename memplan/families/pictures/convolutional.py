"""Image models of convolutions: EfficientNet."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.networks.efficientnet import efficientnet_tower
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.gridded.nets import (
    DropoutBody,
    Window,
    WindowBody,
)

IMAGES = "ForImageClassification"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


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
    "efficientnet": _efficientnet,
}
