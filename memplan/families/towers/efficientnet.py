"""EfficientNet: inverted residual blocks, widened and repeated by two coefficients."""

import math

from memplan.families.towers.sizes import at_least_one, each_stage, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

STEM_CHANNELS, TOP_CHANNELS = 32, 1280
"""Of the first and the last convolution, before they are widened (``EfficientNetEmbeddings``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    in_channels: int
    out_channels: int
    repeats: int
    kernel_size: int
    expand_ratio: int


def efficientnet_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, topped: bool = True
) -> None:
    """The encoder; ``topped`` with a last convolution, which ALIGN's lacks."""
    stem = widened(reader, STEM_CHANNELS)
    with table.block(f"{name}.embed"):
        table.convolution("stem", reader.integer("num_channels"), stem, 3, 3, bias=False)
        table.norm("stem_norm", stem)
    stages = _stages(reader)
    share = ratio(reader, "squeeze_expansion_ratio")
    for index, stage in enumerate(stages):
        with table.block(f"{name}.stages.{index}.first", count=min(1, stage.repeats)):
            _block(table, stage, stage.in_channels, share)
        with table.block(f"{name}.stages.{index}.rest", count=max(0, stage.repeats - 1)):
            _block(table, stage, stage.out_channels, share)
    if topped:
        with table.block(f"{name}.top"):
            top = widened(reader, TOP_CHANNELS)
            table.convolution("top_conv", stages[-1].out_channels, top, 1, 1, bias=False)
            table.norm("top_norm", reader.integer("hidden_dim"))


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
    repeats = each_stage(reader, "num_block_repeats", count)
    depth = ratio(reader, "depth_coefficient")
    return [
        _Stage(
            in_channels=widened(reader, incoming[index]),
            out_channels=widened(reader, outgoing[index]),
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
