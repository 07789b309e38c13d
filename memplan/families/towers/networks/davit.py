"""DaViT, Florence-2's tower: stages of blocks that attend over windows, then over channels."""

from dataclasses import replace

from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, ratio, stage_flags
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.gridded.davit import ChannelsBody, DavitLayerBody
from memplan.model.towers.gridded.nets import PixelsBody

PICTURE_768 = (768, 768)
"""What Florence-2's processor makes of every picture [pixels]."""
DEPTHWISE_KERNEL = 3
"""Of the convolution before each half of a block (``Florence2VisionSpatialBlock``)."""


def davit(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """A convolution and a number of blocks for each stage (``Florence2VisionBackbone``)."""
    widths = stage_widths(reader)
    stages = len(widths)
    kernels, depths = (each_stage(reader, key, stages) for key in ("patch_size", "depths"))
    normed_first = stage_flags(reader, "patch_prenorm", stages)
    times, bias = ratio(reader, "mlp_ratio"), reader.flag("qkv_bias")
    inputs = reader.integer("in_channels")
    strides = each_stage(reader, "patch_stride", stages)
    paddings = each_stage(reader, "patch_padding", stages, minimum=0)
    heads = each_stage(reader, "num_heads", stages)
    groups = each_stage(reader, "num_groups", stages)
    active = tower_activation(reader, "activation_function")
    drops = reader.number("drop_path_rate", default=0.0) > 0
    for stage, width in enumerate(widths):
        first: TowerBody = ChannelsBody(
            size=width, inputs=inputs, kernel=kernels[stage], stride=strides[stage],
            padding=2 * paddings[stage], first=normed_first[stage],
        )  # fmt: skip
        if not stage:
            first = ChainBody(parts=(PixelsBody(channels=inputs, image=PICTURE_768), first))
        layer = DavitLayerBody(
            size=width, inner_size=int(width * times), num_heads=heads[stage],
            num_groups=groups[stage], window=reader.integer("window_size"), activation=active,
            bias=bias, drop_path=(drops, drops),
        )  # fmt: skip
        with table.block(f"{name}.stage{stage}.embed", body=first):
            table.convolution("conv", inputs, width, kernels[stage], kernels[stage])
            table.norm("norm", inputs if normed_first[stage] else width)
        # The very first half drops no path.
        apart = drops and not stage
        for count, body in (
            (int(apart), replace(layer, drop_path=(False, drops))), (depths[stage] - apart, layer),
        ):  # fmt: skip
            if not count:
                continue
            with table.block(f"{name}.stage{stage}.layers", count=count, body=body):
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
