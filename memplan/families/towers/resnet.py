"""ResNet, RegNet and BiT: residual stages of convolutions."""

from collections.abc import Callable

from memplan.families.towers.parts import convolution_norm
from memplan.families.towers.sizes import at_least_one, each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

DeclareLayer = Callable[[ParameterTable, int, int], None]
"""Declares a layer from a number of channels to another."""


def resnet_sizes(reader: ConfigReader) -> list[int]:
    """Channels that each stage gives."""
    return at_least_one(reader, "hidden_sizes")


def resnet_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """ResNet; a stage changes the width or the stride in its first layer, past a shortcut."""
    bottleneck = reader.text("layer_type", default="bottleneck") == "bottleneck"
    _stem(table, name, reader, kernel=7)
    halved_first = reader.flag("downsample_in_first_stage")
    _stages(table, name, reader, _bottleneck if bottleneck else _basic, halved_first=halved_first)


def regnet_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """RegNet X, or Y with squeeze and excitation; its convolutions are grouped."""
    kind = reader.choice("layer_type", reader.text("layer_type"), ("x", "y"))
    width = reader.integer("groups_width")

    def layer(table: ParameterTable, before: int, after: int) -> None:
        groups = max(1, after // width)
        reader.divide("hidden_sizes", after, "groups_width", groups)
        convolution_norm(table, "layer.0", before, after, 1)
        convolution_norm(table, "layer.1", after, after, 3, groups=groups)
        if kind == "y":
            squeezed = round(before / 4)
            table.convolution("attention.0", after, squeezed, 1, 1)
            table.convolution("attention.2", squeezed, after, 1, 1)
        convolution_norm(table, "layer.3", after, after, 1)

    _stem(table, name, reader, kernel=3)
    halved_first = reader.flag("downsample_in_first_stage")
    _stages(table, name, reader, layer, halved_first=halved_first)


def _stem(table: ParameterTable, name: str, reader: ConfigReader, *, kernel: int) -> None:
    with table.block(f"{name}.embed"):
        size = reader.integer("embedding_size")
        convolution_norm(table, "embedder", reader.integer("num_channels"), size, kernel)


def _stages(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    layer: DeclareLayer,
    *,
    halved_first: bool,
) -> None:
    sizes = resnet_sizes(reader)
    depths = each_stage(reader, "depths", len(sizes))
    before = reader.integer("embedding_size")
    for index, (after, depth) in enumerate(zip(sizes, depths, strict=True)):
        with table.block(f"{name}.stages.{index}.first"):
            if before != after or index or halved_first:
                convolution_norm(table, "shortcut", before, after, 1)
            layer(table, before, after)
        with table.block(f"{name}.stages.{index}.rest", count=depth - 1):
            layer(table, after, after)
        before = after


def _basic(table: ParameterTable, before: int, after: int) -> None:
    convolution_norm(table, "layer.0", before, after, 3)
    convolution_norm(table, "layer.1", after, after, 3)


def _bottleneck(table: ParameterTable, before: int, after: int) -> None:
    narrow = after // 4
    convolution_norm(table, "layer.0", before, narrow, 1)
    convolution_norm(table, "layer.1", narrow, narrow, 3)
    convolution_norm(table, "layer.2", narrow, after, 1)


def bit_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """BiT: weights are standardized, norms are of groups and stand before each convolution."""
    preactivated = reader.text("layer_type") == "preactivation"
    size = reader.integer("embedding_size")
    sizes = resnet_sizes(reader)
    with table.block(f"{name}.embed"):
        table.convolution("embedder", reader.integer("num_channels"), size, 7, 7, bias=False)
        if not preactivated:
            table.norm("embedder.norm", size)
    factor = ratio(reader, "width_factor", default=1)
    depths = each_stage(reader, "depths", len(sizes))
    before = size
    for index, depth in enumerate(depths):
        after = _to_eights(sizes[index] * factor)
        with table.block(f"{name}.stages.{index}.first"):
            table.convolution("downsample", before, after, 1, 1, bias=False)
            if not preactivated:
                table.norm("downsample.norm", after)
            _standardized(table, before, after, preactivated=preactivated)
        with table.block(f"{name}.stages.{index}.rest", count=depth - 1):
            _standardized(table, after, after, preactivated=preactivated)
        before = after
    if preactivated:
        with table.block(f"{name}.norm"):
            table.norm("norm", sizes[-1])


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
