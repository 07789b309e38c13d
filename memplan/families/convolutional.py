"""Image models of convolutions: ResNet, RegNet, BiT, EfficientNet, ConvNeXt, PoolFormer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.convnext import convnext_sizes, convnext_tower
from memplan.families.towers.efficientnet import efficientnet_tower
from memplan.families.towers.resnet import (
    bit_tower,
    regnet_tower,
    resnet_sizes,
    resnet_tower,
)
from memplan.families.towers.sizes import each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.pooling import PoolerBody, TowerPooling

IMAGES = "ForImageClassification"
DeclareTower = Callable[[ParameterTable, str, ConfigReader], None]


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _residual(reader: ConfigReader, request: ReadRequest, *, tower: DeclareTower) -> ModelSpec:
    size = resnet_sizes(reader)[-1]

    def declare(table: ParameterTable, ending: str) -> None:
        tower(table, "model", reader)
        if ending == IMAGES:
            classifier(table, "classifier", size, request.labels(reader))

    return _images(reader, request, declare, size)


def _images(
    reader: ConfigReader,
    request: ReadRequest,
    declare: Callable[[ParameterTable, str], None],
    size: int,
    *,
    recomputes: bool = True,
) -> ModelSpec:
    """A classifier of images, which have no sequence: one position."""
    model = whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=size, context_length=1
    )
    return replace(model, recomputes=recomputes)


def _convnext(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = convnext_sizes(reader)[-1]

    def declare(table: ParameterTable, ending: str) -> None:
        normalized = request.model_type == "convnextv2"
        convnext_tower(table, "model", reader, normalized=normalized)
        mean = PoolerBody(pooling=TowerPooling.MEAN, size=size, norm="layernorm")
        with table.block("norm", body=None if normalized else mean):
            table.norm("layernorm", size)
        if ending == IMAGES:
            labels = request.labels(reader)
            classifier(table, "classifier", size, labels, known=not normalized)

    return _images(reader, request, declare, size, recomputes=False)


def _efficientnet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = reader.integer("hidden_dim")

    def declare(table: ParameterTable, ending: str) -> None:
        efficientnet_tower(table, "model", reader)
        if ending == IMAGES:
            classifier(table, "classifier", size, request.labels(reader))

    return _images(reader, request, declare, size)


def _poolformer(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """PoolFormer: pooling for attention; only the classifier has a last norm."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)

    def declare(table: ParameterTable, ending: str) -> None:
        _poolformer_tower(table, reader, sizes)
        if ending == IMAGES:
            with table.block("norm"):
                table.norm("norm", sizes[-1])
            classifier(table, "classifier", sizes[-1], request.labels(reader))

    return _images(reader, request, declare, sizes[-1])


def _poolformer_tower(table: ParameterTable, reader: ConfigReader, sizes: list[int]) -> None:
    kernels = each_stage(reader, "patch_sizes", len(sizes))
    depths = each_stage(reader, "depths", len(sizes))
    before = reader.integer("num_channels")
    for index, size in enumerate(sizes):
        with table.block(f"stages.{index}.embed"):
            table.convolution("patch_embeddings", before, size, kernels[index], kernels[index])
        inner = int(size * ratio(reader, "mlp_ratio"))
        with table.block(f"stages.{index}.layers", count=depths[index]):
            table.convolution("output.conv1", size, inner, 1, 1)
            table.convolution("output.conv2", inner, size, 1, 1)
            table.norm("before_norm", size)
            table.norm("after_norm", size)
            if reader.flag("use_layer_scale", default=True):
                table.parameter("layer", "layer_scale_1", size)
                table.parameter("layer", "layer_scale_2", size)
        before = size


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "resnet": partial(_residual, tower=resnet_tower),
    "regnet": partial(_residual, tower=regnet_tower),
    "bit": partial(_residual, tower=bit_tower),
    "convnext": _convnext,
    "convnextv2": _convnext,
    "efficientnet": _efficientnet,
    "poolformer": _poolformer,
}
