"""Image models of convolutions: ResNet, RegNet, BiT, EfficientNet, ConvNeXt, PoolFormer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.networks.convnext import convnext_sizes, convnext_tower
from memplan.families.towers.networks.efficientnet import efficientnet_tower
from memplan.families.towers.networks.resnet import (
    PICTURE,
    bit_tower,
    regnet_tower,
    resnet_sizes,
    resnet_tower,
    whole_mean,
)
from memplan.families.towers.sizes import each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, LessItselfBody, ResidualBody, TowerBody
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.gridded.nets import (
    ConvolutionBody,
    DropoutBody,
    DropPathBody,
    GroupNormBody,
    PixelsBody,
    Window,
    WindowBody,
)
from memplan.model.towers.parts import ActivationBody

IMAGES = "ForImageClassification"
DeclareTower = Callable[[ParameterTable, str, ConfigReader], None]


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _residual(reader: ConfigReader, request: ReadRequest, *, tower: DeclareTower) -> ModelSpec:
    size = resnet_sizes(reader)[-1]

    def declare(table: ParameterTable, ending: str) -> None:
        tower(table, "model", reader)
        with table.block("model.pooler", body=whole_mean()):
            pass
        if ending == IMAGES:
            classifier(table, "classifier", size, request.labels(reader), known=True)

    return _images(reader, request, declare, size, recomputes=False)


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
        with table.block("norm", body=mean):
            table.norm("layernorm", size)
        if ending == IMAGES:
            labels = request.labels(reader)
            classifier(table, "classifier", size, labels, known=True)

    return _images(reader, request, declare, size, recomputes=False)


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

    return _images(reader, request, declare, size, recomputes=False)


def _poolformer(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """PoolFormer: pooling for attention; only the classifier has a last norm."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)

    def declare(table: ParameterTable, ending: str) -> None:
        _poolformer_tower(table, reader, sizes)
        if ending == IMAGES:
            last = ChainBody(parts=(GroupNormBody(module="norm", groups=1), whole_mean()))
            with table.block("norm", body=last):
                table.norm("norm", sizes[-1])
            classifier(table, "classifier", sizes[-1], request.labels(reader), known=True)

    return _images(reader, request, declare, sizes[-1], recomputes=False)


def _poolformer_tower(table: ParameterTable, reader: ConfigReader, sizes: list[int]) -> None:
    kernels = each_stage(reader, "patch_sizes", len(sizes))
    depths = each_stage(reader, "depths", len(sizes))
    strides = each_stage(reader, "strides", len(sizes))
    padding = each_stage(reader, "padding", len(sizes), minimum=0)
    before = reader.integer("num_channels")
    pixels = PixelsBody(channels=before, image=(PICTURE, PICTURE))
    drops = reader.number("drop_path_rate", default=0.0) > 0
    for index, size in enumerate(sizes):
        fewer = ConvolutionBody(
            module="patch_embeddings", kernel=kernels[index], stride=strides[index],
            padding=2 * padding[index], bias=True,
        )  # fmt: skip
        embed = fewer if index else ChainBody(parts=(pixels, fewer))
        with table.block(f"stages.{index}.embed", body=embed):
            table.convolution("patch_embeddings", before, size, kernels[index], kernels[index])
        inner = int(size * ratio(reader, "mlp_ratio"))
        # The very first layer's share of dropped samples is 0.
        one = 0 if index else min(1, depths[0])
        for count, body in (
            (one, _poolformer_layer(reader, drops=False)),
            (depths[index] - one, _poolformer_layer(reader, drops=drops)),
        ):
            _poolformer_block(table, reader, index, count, size, inner, body)
        before = size


def _poolformer_layer(reader: ConfigReader, *, drops: bool) -> TowerBody:
    """``PoolFormerLayer``: what pooling changes, then two linear layers, each added."""
    size = reader.integer("pool_size")
    pooling = WindowBody(window=Window.MEAN, kernel=size, padding=size // 2 * 2)
    scaled = reader.flag("use_layer_scale", default=True)
    dropped = (DropPathBody(),) if drops else ()
    first = (GroupNormBody(module="before_norm", groups=1), LessItselfBody(part=pooling))
    second = (
        GroupNormBody(module="after_norm", groups=1),
        ConvolutionBody(module="output.conv1", kernel=1, bias=True),
        ActivationBody(activation=tower_activation(reader, "hidden_act")),
        *dropped,
        ConvolutionBody(module="output.conv2", kernel=1, bias=True),
        *dropped,
    )
    return ChainBody(
        parts=tuple(
            ResidualBody(
                branch=branch,
                scale=f"layer.layer_scale_{number}" if scaled else "",
                drop_path=drops,
            )
            for number, branch in ((1, first), (2, second))
        )
    )


def _poolformer_block(
    table: ParameterTable,
    reader: ConfigReader,
    index: int,
    count: int,
    size: int,
    inner: int,
    body: TowerBody,
) -> None:
    with table.block(f"stages.{index}.layers", count=count, body=body):
        table.convolution("output.conv1", size, inner, 1, 1)
        table.convolution("output.conv2", inner, size, 1, 1)
        table.norm("before_norm", size)
        table.norm("after_norm", size)
        if reader.flag("use_layer_scale", default=True):
            table.parameter("layer", "layer_scale_1", size)
            table.parameter("layer", "layer_scale_2", size)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "resnet": partial(_residual, tower=resnet_tower),
    "regnet": partial(_residual, tower=regnet_tower),
    "bit": partial(_residual, tower=bit_tower),
    "convnext": _convnext,
    "convnextv2": _convnext,
    "efficientnet": _efficientnet,
    "poolformer": _poolformer,
}
