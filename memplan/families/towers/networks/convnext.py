"""ConvNeXt and ConvNeXt V2: a depthwise convolution and two linear layers, in stages."""

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, pair, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.gridded.convolved import ConvolvedLayerBody, DownsamplingBody
from memplan.model.towers.gridded.grids import LevelBody
from memplan.model.towers.parts import NormBody
from memplan.model.towers.patches import PatchesBody

KERNEL = 7
"""Of the depthwise convolution; between stages it is 2 (``ConvNextLayer``, ``ConvNextStage``)."""
EXPANSION = 4


def convnext_sizes(reader: ConfigReader) -> list[int]:
    """Channels of each stage."""
    return each_stage(reader, "hidden_sizes", reader.layers("num_stages"))


def convnext_tower(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    normalized: bool = False,
    keeps_levels: bool = False,
) -> None:
    """Stem and stages; ``normalized`` is V2's, whose responses are normalized.

    With ``keeps_levels`` all stages' results are read later; the last one's is what it gives.
    """
    sizes = convnext_sizes(reader)
    patch_size = reader.integer("patch_size")
    channels = reader.integer("num_channels")
    patches = PatchesBody(
        size=sizes[0], channels=channels, image=pair(reader, "image_size"),
        patch=(patch_size, patch_size), projection="patch_embeddings", casts_pictures=False,
        by_channel=True,
    )  # fmt: skip
    stem = ChainBody(parts=(patches, NormBody(module="embed_norm", size=sizes[0], turned=True)))
    with table.block(f"{name}.embed", body=stem):
        table.convolution("patch_embeddings", channels, sizes[0], patch_size, patch_size)
        table.norm("embed_norm", sizes[0])
    scaled = not normalized and ratio(reader, "layer_scale_init_value") > 0
    depths = each_stage(reader, "depths", len(sizes), minimum=0)
    for index, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
        if index:
            sides = sizes[index - 1], size
            _downsampling(table, f"{name}.downsampling.{index}", *sides, keeps=keeps_levels)
        layer = ConvolvedLayerBody(
            size=size, inner_size=EXPANSION * size,
            activation=tower_activation(reader, "hidden_act"),
            response_norm="response_norm" if normalized else "",
            scale="layer.layer_scale_parameter" if scaled else "",
            drop_path=reader.number("drop_path_rate", default=0.0) > 0,
        )  # fmt: skip
        with table.block(f"{name}.stages.{index}.layers", count=depth, body=layer):
            _layer(table, size, scaled=scaled, normalized=normalized)


def _downsampling(
    table: ParameterTable, name: str, before: int, after: int, *, keeps: bool
) -> None:
    kept = (LevelBody(),) if keeps else ()
    norm = NormBody(module="downsampling_norm", size=before, turned=True)
    fewer = DownsamplingBody(module="downsampling", size=before, side=2)
    with table.block(name, body=ChainBody(parts=(*kept, norm, fewer))):
        table.norm("downsampling_norm", before)
        table.convolution("downsampling", before, after, 2, 2)


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
