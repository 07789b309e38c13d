"""ConvNeXt and ConvNeXt V2: a depthwise convolution and two linear layers, in stages."""

from itertools import pairwise

from memplan.families.towers.sizes import each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

KERNEL = 7
"""Of the depthwise convolution; between stages it is 2 (``ConvNextLayer``, ``ConvNextStage``)."""
EXPANSION = 4


def convnext_sizes(reader: ConfigReader) -> list[int]:
    """Channels of each stage."""
    return each_stage(reader, "hidden_sizes", reader.layers("num_stages"))


def convnext_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, normalized: bool = False
) -> None:
    """Stem and stages; ``normalized`` is V2's, whose responses are normalized."""
    sizes = convnext_sizes(reader)
    patch_size = reader.integer("patch_size")
    with table.block(f"{name}.embed"):
        channels = reader.integer("num_channels")
        table.convolution("patch_embeddings", channels, sizes[0], patch_size, patch_size)
        table.norm("embed_norm", sizes[0])
    scaled = not normalized and ratio(reader, "layer_scale_init_value") > 0
    for index, (before, after) in enumerate(pairwise(sizes)):
        with table.block(f"{name}.downsampling.{index + 1}"):
            table.norm("downsampling_norm", before)
            table.convolution("downsampling", before, after, 2, 2)
    depths = each_stage(reader, "depths", len(sizes), minimum=0)
    for index, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        with table.block(f"{name}.stages.{index}.layers", count=depth):
            _layer(table, size, scaled=scaled, normalized=normalized)


def _layer(table: ParameterTable, size: int, *, scaled: bool, normalized: bool) -> None:
    table.convolution("dwconv", size, size, KERNEL, KERNEL, groups=size)
    table.norm("layernorm", size)
    table.linear("pwconv1", size, EXPANSION * size)
    if normalized:
        table.parameter("response_norm", "weight", 1, 1, 1, EXPANSION * size)
        table.parameter("response_norm", "bias", 1, 1, 1, EXPANSION * size)
    table.linear("pwconv2", EXPANSION * size, size)
    if scaled:
        table.parameter("layer", "layer_scale_parameter", size)
