"""HGNetV2: blocks that keep what each of their layers made, and squeeze it all at the end."""

from memplan.families.towers.sizes import MAX_PARTS, at_least_one, each_stage, stage_flags
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def hgnet_sizes(reader: ConfigReader) -> list[int]:
    """Channels that each stage gives."""
    return at_least_one(reader, "stage_out_channels")


def hgnet_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, trained_norms: bool
) -> None:
    """Stem and stages; without ``trained_norms`` their batch norms own buffers only."""
    sizes = hgnet_sizes(reader)
    count = len(sizes)
    affine = reader.flag("use_learnable_affine_block")
    layers = _Layers(table, trained_norms=trained_norms, affine=affine)
    with table.block(f"{name}.embed"):
        first, middle, last = each_stage(reader, "stem_channels", 3)
        layers.convolution("stem1", first, middle, 3)
        layers.convolution("stem2a", middle, middle // 2, 2)
        layers.convolution("stem2b", middle // 2, middle, 2)
        layers.convolution("stem3", 2 * middle, middle, 3)
        layers.convolution("stem4", middle, last, 1)
    incoming = each_stage(reader, "stage_in_channels", count)
    blocks = each_stage(reader, "stage_num_blocks", count)
    narrowed = stage_flags(reader, "stage_downsample", count)
    for index, size in enumerate(sizes):
        with table.block(f"{name}.stages.{index}.first"):
            before = incoming[index]
            if narrowed[index]:
                layers.convolution("downsample", before, before, 3, groups=before, active=False)
            _block(layers, reader, index, before, size)
        with table.block(f"{name}.stages.{index}.rest", count=blocks[index] - 1):
            _block(layers, reader, index, size, size)


class _Layers:
    """Declares convolutions with what follows them."""

    def __init__(self, table: ParameterTable, *, trained_norms: bool, affine: bool) -> None:
        self.table = table
        self.trained_norms = trained_norms
        self.affine = affine

    def convolution(
        self,
        name: str,
        before: int,
        after: int,
        kernel: int,
        *,
        groups: int = 1,
        active: bool = True,
    ) -> None:
        """``HGNetV2ConvLayer``: behind an activation a scale and a bias may follow."""
        self.table.convolution(name, before, after, kernel, kernel, groups=groups, bias=False)
        if self.trained_norms:
            self.table.norm(f"{name}.normalization", after)
        if active and self.affine:
            self.table.norm(f"{name}.affine", 1)


def _block(layers: _Layers, reader: ConfigReader, index: int, before: int, after: int) -> None:
    """``HGNetV2BasicLayer``; a light one has a plain and a depthwise convolution in each layer."""
    count = len(hgnet_sizes(reader))
    middle = each_stage(reader, "stage_mid_channels", count)[index]
    kernel = each_stage(reader, "stage_kernel_size", count)[index]
    depth = each_stage(reader, "stage_numb_of_layers", count, maximum=MAX_PARTS)[index]
    light = stage_flags(reader, "stage_light_block", count)[index]
    for layer in range(depth):
        given = middle if layer else before
        if light:
            layers.convolution(f"layers.{layer}.conv1", given, middle, 1, active=False)
            layers.convolution(f"layers.{layer}.conv2", middle, middle, kernel, groups=middle)
        else:
            layers.convolution(f"layers.{layer}", given, middle, kernel)
    layers.convolution("aggregation.0", before + depth * middle, after // 2, 1)
    layers.convolution("aggregation.1", after // 2, after, 1)
