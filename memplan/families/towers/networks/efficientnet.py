"""EfficientNet: inverted residual blocks, widened and repeated by two coefficients."""

import math
from dataclasses import replace

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import at_least_one, each_stage, pair, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, GateBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.nets import (
    BatchNormBody,
    ConvolutionBody,
    PaddingBody,
    PixelsBody,
    SigmoidBody,
    Window,
    WindowBody,
)
from memplan.model.towers.parts import ActivationBody

STEM_CHANNELS, TOP_CHANNELS = 32, 1280
"""Of the first and the last convolution, before they are widened (``EfficientNetEmbeddings``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    in_channels: int
    out_channels: int
    repeats: int
    stride: int
    kernel_size: int
    expand_ratio: int


def efficientnet_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, topped: bool = True
) -> None:
    """The encoder; ``topped`` with a last convolution, which ALIGN's lacks."""
    stem, channels = widened(reader, STEM_CHANNELS), reader.integer("num_channels")
    active = tower_activation(reader, "hidden_act", default="swish")
    image = pair(reader, "image_size")
    with table.block(f"{name}.embed", body=_stem(channels, image, stem, active)):
        table.convolution("stem", channels, stem, 3, 3, bias=False)
        table.norm("stem_norm", stem)
    stages = _stages(reader)
    share = ratio(reader, "squeeze_expansion_ratio")
    drop = reader.number("drop_connect_rate", default=0.0)
    unpadded = reader.integers("depthwise_padding", minimum=0)
    position = 0
    for index, stage in enumerate(stages):
        first = _block_body(stage, active, None, adjusts=position not in unpadded)
        with table.block(f"{name}.stages.{index}.first", count=min(1, stage.repeats), body=first):
            _block(table, stage, stage.in_channels, share)
        rest = _block_body(replace(stage, in_channels=stage.out_channels, stride=1), active, drop)
        count = max(0, stage.repeats - 1)
        with table.block(f"{name}.stages.{index}.rest", count=count, body=rest):
            _block(table, stage, stage.out_channels, share)
        position += stage.repeats
    if topped:
        top, size = widened(reader, TOP_CHANNELS), reader.integer("hidden_dim")
        body = ChainBody(parts=_normed("top_conv", "top_norm", 1, size, active))
        with table.block(f"{name}.top", body=body):
            table.convolution("top_conv", stages[-1].out_channels, top, 1, 1, bias=False)
            table.norm("top_norm", size)


def _normed(
    module: str,
    norm: str,
    kernel: int,
    channels: int,
    active: Activation | None,
    *,
    stride: int = 1,
) -> tuple[TowerBody, ...]:
    """A convolution that keeps the size unless it skips positions, a norm, a nonlinearity."""
    padding = kernel - 1 if stride == 1 else 0
    parts: tuple[TowerBody, ...] = (
        ConvolutionBody(module=module, kernel=kernel, stride=stride, padding=padding),
        BatchNormBody(module=norm, channels=channels),
    )
    return parts if active is None else (*parts, ActivationBody(activation=active))


def _stem(channels: int, image: tuple[int, int], size: int, active: Activation) -> ChainBody:
    """``EfficientNetEmbeddings``: a row and a column are added behind each picture."""
    pixels = PixelsBody(channels=channels, image=image)
    convolved = _normed("stem", "stem_norm", 3, size, active, stride=2)
    return ChainBody(parts=(pixels, PaddingBody(rows=1), *convolved))


def _block_body(
    stage: _Stage, active: Activation, drop: float | None, *, adjusts: bool = True
) -> TowerBody:
    """``EfficientNetBlock``; ``drop`` is None for a stage's first, which nothing goes past."""
    inner, kernel = stage.in_channels * stage.expand_ratio, stage.kernel_size
    parts: tuple[TowerBody, ...] = ()
    if stage.expand_ratio != 1:
        parts += _normed("expand_conv", "expand_norm", 1, inner, active)
    if stage.stride == 2:
        parts += (PaddingBody(rows=2 * (kernel // 2) - adjusts),)
    parts += _normed("depthwise_conv", "depthwise_norm", kernel, inner, active, stride=stage.stride)
    squeezed = GateBody(
        parts=(
            WindowBody(window=Window.MEAN, keeps_input=False),
            ConvolutionBody(module="squeeze_excite.reduce", kernel=1, bias=True),
            ActivationBody(activation=active),
            ConvolutionBody(module="squeeze_excite.expand", kernel=1, bias=True),
            SigmoidBody(),
        )
    )
    parts += (squeezed, *_normed("project_conv", "project_norm", 1, stage.out_channels, None))
    if drop is None:
        return ChainBody(parts=parts)
    return ResidualBody(branch=parts, dropout=drop)


def widened(reader: ConfigReader, num_channels: int) -> int:
    """Channels times the width coefficient, to a multiple of the divisor (``round_filters``)."""
    divisor = reader.integer("depth_divisor")
    wanted = num_channels * ratio(reader, "width_coefficient")
    rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * wanted else rounded


def _stages(reader: ConfigReader) -> list[_Stage]:
    incoming = at_least_one(reader, "in_channels")
    count = len(incoming)
    outgoing = each_stage(reader, "out_channels", count)
    kernels = each_stage(reader, "kernel_sizes", count)
    expansions = each_stage(reader, "expand_ratios", count)
    strides = each_stage(reader, "strides", count)
    repeats = each_stage(reader, "num_block_repeats", count)
    depth = ratio(reader, "depth_coefficient")
    return [
        _Stage(
            in_channels=widened(reader, incoming[index]),
            out_channels=widened(reader, outgoing[index]),
            stride=strides[index],
            repeats=math.ceil(depth * repeats[index]),
            kernel_size=kernels[index],
            expand_ratio=expansions[index],
        )
        for index in range(count)
    ]


def _block(table: ParameterTable, stage: _Stage, in_channels: int, share: float) -> None:
    """Expand, convolve each channel, squeeze and excite, project."""
    inner = in_channels * stage.expand_ratio
    if stage.expand_ratio != 1:
        table.convolution("expand_conv", in_channels, inner, 1, 1, bias=False)
        table.norm("expand_norm", inner)
    kernel = stage.kernel_size
    table.convolution("depthwise_conv", inner, inner, kernel, kernel, groups=inner, bias=False)
    table.norm("depthwise_norm", inner)
    squeezed = max(1, int(in_channels * share))
    table.convolution("squeeze_excite.reduce", inner, squeezed, 1, 1)
    table.convolution("squeeze_excite.expand", squeezed, inner, 1, 1)
    table.convolution("project_conv", inner, stage.out_channels, 1, 1, bias=False)
    table.norm("project_norm", stage.out_channels)
