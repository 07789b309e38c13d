"""DaViT, Florence-2's tower: stages of blocks that attend over windows, then over channels."""

from memplan.families.towers.blocks import perceptron
from memplan.families.towers.sizes import each_stage, ratio, stage_flags
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

DEPTHWISE_KERNEL = 3
"""Of the convolution before each half of a block (``Florence2VisionSpatialBlock``)."""


def davit(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """A convolution and a number of blocks for each stage (``Florence2VisionBackbone``)."""
    widths = stage_widths(reader)
    stages = len(widths)
    kernels = each_stage(reader, "patch_size", stages)
    depths = each_stage(reader, "depths", stages)
    normed_first = stage_flags(reader, "patch_prenorm", stages)
    times, bias = ratio(reader, "mlp_ratio"), reader.flag("qkv_bias")
    inputs = reader.integer("in_channels")
    for stage, width in enumerate(widths):
        with table.block(f"{name}.stage{stage}.embed"):
            table.convolution("conv", inputs, width, kernels[stage], kernels[stage])
            table.norm("norm", inputs if normed_first[stage] else width)
        with table.block(f"{name}.stage{stage}.layers", count=depths[stage]):
            for half in ("spatial", "channel"):
                _half(table, half, width, int(width * times), bias=bias)
        inputs = width


def stage_widths(reader: ConfigReader) -> list[int]:
    """Channels of each stage; an error where there is none."""
    widths = reader.integers("embed_dim", minimum=1)
    if not widths:
        error = reader.fail("embed_dim", "is empty")
        raise error
    return widths


def _half(table: ParameterTable, half: str, width: int, inner: int, *, bias: bool) -> None:
    for number in (1, 2):
        table.convolution(
            f"{half}.conv{number}", width, width, DEPTHWISE_KERNEL, DEPTHWISE_KERNEL, groups=width
        )
        table.norm(f"{half}.norm{number}", width)
    table.linear(f"{half}.attn.qkv", width, 3 * width, bias=bias)
    table.linear(f"{half}.attn.proj", width, width)
    perceptron(table, f"{half}.ffn", width, inner)
