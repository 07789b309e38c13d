"""ResNet, RegNet and BiT: residual stages of convolutions."""

from collections.abc import Callable

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import convolution_norm
from memplan.families.towers.sizes import at_least_one, each_stage, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, GateBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.grids import LevelBody
from memplan.model.towers.gridded.nets import (
    BatchNormBody,
    ConvolutionBody,
    GroupNormBody,
    PaddingBody,
    PixelsBody,
    SigmoidBody,
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


def regnet_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """RegNet X, or Y with squeeze and excitation; its convolutions are grouped."""
    kind = reader.choice("layer_type", reader.text("layer_type"), ("x", "y"))
    width = reader.integer("groups_width")
    active = tower_activation(reader, "hidden_act", default="relu")

    def layer(table: ParameterTable, before: int, after: int, stride: int) -> tuple[TowerBody, ...]:
        groups = max(1, after // width)
        reader.divide("hidden_sizes", after, "groups_width", groups)
        parts = _conv_norm(table, "layer.0", before, after, 1, activation=active)
        parts += _conv_norm(
            table, "layer.1", after, after, 3, stride=stride, groups=groups, activation=active
        )
        if kind == "y":
            squeezed = round(before / 4)
            table.convolution("attention.0", after, squeezed, 1, 1)
            table.convolution("attention.2", squeezed, after, 1, 1)
            parts += (_squeezed(),)
        return (*parts, *_conv_norm(table, "layer.3", after, after, 1))

    _stem(table, name, reader, kernel=3)
    _stages(table, name, reader, layer, active)


def _squeezed() -> GateBody:
    """``RegNetSELayer``."""
    return GateBody(
        parts=(
            whole_mean(),
            ConvolutionBody(module="attention.0", kernel=1, bias=True),
            ActivationBody(activation=Activation.RELU),
            ConvolutionBody(module="attention.2", kernel=1, bias=True),
            SigmoidBody(),
        )
    )


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


STRIDE_OF_STEM = 4
"""How much smaller a picture is behind BiT's stem (``BitEncoder``)."""


def bit_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """BiT: weights are standardized, norms are of groups and stand before each convolution."""
    preactivated = reader.text("layer_type") == "preactivation"
    size, channels = reader.integer("embedding_size"), reader.integer("num_channels")
    sizes = resnet_sizes(reader)
    depths = each_stage(reader, "depths", len(sizes))
    kind = _BitKind(
        groups=reader.integer("num_groups"),
        activation=tower_activation(reader, "hidden_act", default="relu"),
        preactivated=preactivated,
        written=_bit_is_written(reader, len(sizes)),
    )
    stem: tuple[TowerBody, ...] = (
        PixelsBody(channels=channels, image=(PICTURE, PICTURE)),
        ConvolutionBody(module="embedder", kernel=7, stride=2, padding=6, standardized=True),
        PaddingBody(rows=2),
    )
    if not preactivated:
        stem += kind.norm("embedder.norm")
    if reader.flag("embedding_dynamic_padding"):
        stem += (PaddingBody(rows=1),)
    stem += (WindowBody(window=Window.GREATEST, kernel=3, stride=2),)
    with table.block(f"{name}.embed", body=kind.body(stem)):
        table.convolution("embedder", channels, size, 7, 7, bias=False)
        if not preactivated:
            table.norm("embedder.norm", size)
    factor = ratio(reader, "width_factor", default=1)
    drops = reader.number("drop_path_rate", default=0.0) > 0
    before = size
    for index, depth in enumerate(depths):
        after = _to_eights(sizes[index] * factor)
        # The very first layer's share of dropped samples is 0.
        first = kind.layer(2 if index else 1, drops=drops and index > 0, is_first=True)
        with table.block(f"{name}.stages.{index}.first", body=first):
            table.convolution("downsample", before, after, 1, 1, bias=False)
            if not preactivated:
                table.norm("downsample.norm", after)
            _standardized(table, before, after, preactivated=preactivated)
        rest = kind.layer(1, drops=drops)
        with table.block(f"{name}.stages.{index}.rest", count=depth - 1, body=rest):
            _standardized(table, after, after, preactivated=preactivated)
        before = after
    if preactivated:
        with table.block(f"{name}.norm", body=kind.body(kind.norm("norm"))):
            table.norm("norm", sizes[-1])


def _bit_is_written(reader: ConfigReader, num_stages: int) -> bool:
    """Whether convolutions pad as they always do, and none is dilated."""
    dilated = reader.integer("output_stride", default=32) < STRIDE_OF_STEM * 2 ** (num_stages - 1)
    return reader.raw("global_padding") is None and not dilated


@dataclass(frozen=True, kw_only=True, slots=True)
class _BitKind:
    groups: int
    activation: Activation
    preactivated: bool
    written: bool

    def body(self, parts: tuple[TowerBody, ...]) -> TowerBody | None:
        return ChainBody(parts=parts) if self.written else None

    def norm(self, module: str, *, active: bool = True) -> tuple[TowerBody, ...]:
        activation = self.activation if active else None
        return (GroupNormBody(module=module, groups=self.groups, activation=activation),)

    def layer(self, stride: int, *, drops: bool, is_first: bool = False) -> TowerBody | None:
        """``BitPreActivationBottleneckLayer`` or ``BitBottleneckLayer``."""
        conv = {
            name: ConvolutionBody(module=name, kernel=1, standardized=True)
            for name in ("conv1", "conv3")
        }
        middle = ConvolutionBody(
            module="conv2", kernel=3, stride=stride, padding=2, standardized=True
        )
        past = ConvolutionBody(module="downsample", kernel=1, stride=stride, standardized=True)
        if not self.preactivated:
            branch = (
                conv["conv1"], *self.norm("norm1"), middle, *self.norm("norm2"), conv["conv3"],
                *self.norm("norm3", active=False),
            )  # fmt: skip
            shortcut = (past, *self.norm("downsample.norm", active=False)) if is_first else ()
            added = ResidualBody(
                branch=branch, shortcut=shortcut, shortcut_first=True, drop_path=drops
            )
            return self.body((added, ActivationBody(activation=self.activation)))
        before = self.norm("norm1")
        branch = (
            conv["conv1"], *self.norm("norm2"), middle, *self.norm("norm3"), conv["conv3"]
        )  # fmt: skip
        if is_first:
            added = ResidualBody(
                branch=branch, shortcut=(past,), shortcut_first=True, drop_path=drops
            )
            return self.body((*before, added))
        return self.body((ResidualBody(branch=(*before, *branch), drop_path=drops),))


def _standardized(table: ParameterTable, before: int, after: int, *, preactivated: bool) -> None:
    narrow = _to_eights(after / 4)
    table.norm("norm1", before if preactivated else narrow)
    table.convolution("conv1", before, narrow, 1, 1, bias=False)
    table.norm("norm2", narrow)
    table.convolution("conv2", narrow, narrow, 3, 3, bias=False)
    table.norm("norm3", narrow if preactivated else after)
    table.convolution("conv3", narrow, after, 1, 1, bias=False)


def _to_eights(value: float) -> int:
    """The nearest multiple of eight, not more than a tenth below (``make_div``)."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded
