"""ResNet: residual stages of convolutions."""

from collections.abc import Callable

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import convolution_norm
from memplan.families.towers.sizes import at_least_one, each_stage
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.grids import LevelBody
from memplan.model.towers.gridded.nets import (
    BatchNormBody,
    ConvolutionBody,
    PixelsBody,
    Window,
    WindowBody,
)
from memplan.model.towers.parts import ActivationBody

PICTURE = 224
"""What pictures are cut to, where a config does not say it: these classes take any."""

DeclareLayer = Callable[[ParameterTable, int, int, int], tuple[TowerBody, ...]]
"""Declares a layer from a number of channels to another, with a stride; gives what it computes."""


def resnet_sizes(reader: ConfigReader) -> list[int]:
    """Channels that each stage gives."""
    return at_least_one(reader, "hidden_sizes")


def whole_mean() -> WindowBody:
    """The mean over a picture (``torch.nn.AdaptiveAvgPool2d`` of one number)."""
    return WindowBody(window=Window.MEAN, keeps_input=False)


def _conv_norm(
    table: ParameterTable,
    name: str,
    before: int,
    after: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    activation: Activation | None = None,
) -> tuple[TowerBody, ...]:
    """Declare a convolution without a bias and a batch norm; what they compute."""
    convolution_norm(table, name, before, after, kernel, groups=groups)
    parts: tuple[TowerBody, ...] = (
        ConvolutionBody(
            module=f"{name}.convolution", kernel=kernel, stride=stride, padding=kernel // 2 * 2
        ),
        BatchNormBody(module=f"{name}.normalization", channels=after),
    )
    return parts if activation is None else (*parts, ActivationBody(activation=activation))


def resnet_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, keeps_levels: bool = False
) -> None:
    """ResNet; a stage changes the width or the stride in its first layer, past a shortcut.

    With ``keeps_levels`` all stages' results are read later; the last one's is what it gives.
    """
    bottleneck = reader.text("layer_type", default="bottleneck") == "bottleneck"
    active = tower_activation(reader, "hidden_act", default="relu")
    early = reader.flag("downsample_in_bottleneck")

    def basic(table: ParameterTable, before: int, after: int, stride: int) -> tuple[TowerBody, ...]:
        first = _conv_norm(
            table, "layer.0", before, after, 3, stride=stride, activation=Activation.RELU
        )
        return (*first, *_conv_norm(table, "layer.1", after, after, 3))

    def narrowed(
        table: ParameterTable, before: int, after: int, stride: int
    ) -> tuple[TowerBody, ...]:
        narrow, relu = after // 4, Activation.RELU
        first, second = (stride, 1) if early else (1, stride)
        return (
            *_conv_norm(table, "layer.0", before, narrow, 1, stride=first, activation=relu),
            *_conv_norm(table, "layer.1", narrow, narrow, 3, stride=second, activation=relu),
            *_conv_norm(table, "layer.2", narrow, after, 1),
        )

    smaller = WindowBody(window=Window.GREATEST, kernel=3, stride=2, padding=2)
    _stem(table, name, reader, kernel=7, behind=(smaller,))
    layer = narrowed if bottleneck else basic
    _stages(table, name, reader, layer, active, keeps=keeps_levels)


def _stem(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    kernel: int,
    behind: tuple[TowerBody, ...] = (),
) -> None:
    channels, size = reader.integer("num_channels"), reader.integer("embedding_size")
    active = tower_activation(reader, "hidden_act", default="relu")
    pixels = PixelsBody(channels=channels, image=(PICTURE, PICTURE))
    with table.block(f"{name}.embed"):
        parts = _conv_norm(table, "embedder", channels, size, kernel, stride=2, activation=active)
        table.computes(ChainBody(parts=(pixels, *parts, *behind)))


def _stages(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    layer: DeclareLayer,
    active: Activation,
    *,
    keeps: bool = False,
) -> None:
    sizes = resnet_sizes(reader)
    depths = each_stage(reader, "depths", len(sizes))
    before = reader.integer("embedding_size")
    halved_first = reader.flag("downsample_in_first_stage")
    for index, (after, depth) in enumerate(zip(sizes, depths, strict=True)):
        stride = 2 if index or halved_first else 1
        kept = (LevelBody(),) if keeps and index else ()
        step = _Step(before, after, stride)
        _layer(table, f"{name}.stages.{index}.first", layer, step, active, before=kept)
        rest = _Step(after, after, 1)
        _layer(table, f"{name}.stages.{index}.rest", layer, rest, active, count=depth - 1)
        before = after


@dataclass(frozen=True, slots=True)
class _Step:
    before: int
    after: int
    stride: int


def _layer(
    table: ParameterTable,
    name: str,
    layer: DeclareLayer,
    step: _Step,
    active: Activation,
    *,
    count: int = 1,
    before: tuple[TowerBody, ...] = (),
) -> None:
    """``ResNetBottleNeckLayer`` and its kin: the sum is made in place, then the nonlinearity."""
    changes = step.before != step.after or step.stride != 1
    with table.block(name, count=count):
        shortcut: tuple[TowerBody, ...] = ()
        if changes:
            shortcut = _conv_norm(table, "shortcut", step.before, step.after, 1, stride=step.stride)
        branch = layer(table, step.before, step.after, step.stride)
        added = ResidualBody(branch=branch, shortcut=shortcut, in_place=True)
        table.computes(ChainBody(parts=(*before, added, ActivationBody(activation=active))))
