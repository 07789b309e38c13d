"""Segment Anything's encoders of images: a ViT with attention in windows, and Hiera for SAM 2."""

from dataclasses import replace
from itertools import groupby

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import fused_attention
from memplan.families.towers.sizes import each_stage, pair, ratio
from memplan.families.towers.vit import patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.gridded.grids import LevelBody
from memplan.model.towers.gridded.segmenting import MaskNeckBody, WindowedLayerBody
from memplan.model.towers.patches import PatchesBody, Positions


def sam_vision(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    written_out: bool = False,
    keeps_wide: bool = False,
) -> None:
    """``SamVisionEncoder``: relative positions in every layer, and a neck of two convolutions.

    With ``keeps_wide`` it gives what each layer over whole pictures gave, too.
    """
    size = reader.integer("hidden_size")
    grid = reader.integer("image_size") // reader.integer("patch_size")
    placed = reader.flag("use_abs_pos", default=True)
    patches = _patches(reader, size, placed=placed)
    with table.block(f"{name}.embed", body=patches):
        patch_projection(table, reader, size)
        if placed:
            table.parameter("vision_encoder", "pos_embed", 1, grid, grid, size)
    inner = reader.optional_integer("mlp_dim")
    if inner is None:
        inner = int(size * ratio(reader, "mlp_ratio", default=4))
    count = reader.layers("num_hidden_layers")
    window = reader.integer("window_size", minimum=0)
    wide = _wide_layers(reader, count, is_read=keeps_wide)
    for is_wide, group in groupby(range(count), wide.__contains__):
        side = 0 if is_wide else window
        body = replace(_layer_body(reader, inner, side), written_out=written_out)
        number = len(list(group))
        times, each = (number, 1) if is_wide and keeps_wide else (1, number)
        made = ChainBody(parts=(body, LevelBody())) if is_wide and keeps_wide else body
        for _ in range(times):
            with table.block(f"{name}.layers", count=each, body=made):
                _layer(table, reader, inner, side or grid)
    out = reader.integer("output_channels")
    with table.block(f"{name}.neck", body=MaskNeckBody(size=size, outputs=out)):
        table.convolution("neck.conv1", size, out, 1, 1, bias=False)
        table.norm("neck.layer_norm1", out)
        table.convolution("neck.conv2", out, out, 3, 3, bias=False)
        table.norm("neck.layer_norm2", out)


def _patches(reader: ConfigReader, size: int, *, placed: bool) -> PatchesBody:
    """What becomes of a picture before the first layer."""
    return PatchesBody(
        size=size, channels=reader.integer("num_channels"), image=pair(reader, "image_size"),
        patch=pair(reader, "patch_size"), projection="patch_embeddings", casts_pictures=False,
        positions=Positions.PARAMETER if placed else Positions.NONE,
        position_module="vision_encoder.pos_embed",
    )  # fmt: skip


def _wide_layers(reader: ConfigReader, count: int, *, is_read: bool) -> set[int]:
    """Layers that see a whole picture, of which masks are made where they are read.

    Raises ``ConfigError`` where there is none to read.
    """
    key = "global_attn_indexes"
    wide = set(reader.integers(key))
    if is_read and not wide.intersection(range(count)):
        raise reader.fail(
            key, f"must name one of the {count} layers: masks are made of what it sees"
        )
    return wide


def got_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``GotOcr2VisionEncoder``: Segment Anything's, with scores written out."""
    own = ParameterTable()
    sam_vision(own, name, reader, written_out=True)
    for block in own.blocks():
        body = block.body
        if isinstance(body, PatchesBody):
            body = replace(body, casts_pictures=True, resized=True)
        table.add(replace(block, body=body))


def _layer_body(reader: ConfigReader, inner: int, window: int) -> WindowedLayerBody:
    return WindowedLayerBody(
        size=reader.integer("hidden_size"), inner_size=inner, window=window,
        num_heads=reader.integer("num_attention_heads"),
        relative=reader.flag("use_rel_pos", default=True),
        bias=reader.flag("qkv_bias", default=True),
        dropout=reader.number("attention_dropout", default=0.0),
        activation=tower_activation(reader, "hidden_act"),
    )  # fmt: skip


def _layer(table: ParameterTable, reader: ConfigReader, inner: int, extent: int) -> None:
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", size, "num_attention_heads", heads)
    table.norm("layer_norm1", size)
    table.norm("layer_norm2", size)
    fused_attention(table, "attn", size, bias=reader.flag("qkv_bias", default=True))
    if reader.flag("use_rel_pos", default=True):
        table.parameter("attn", "rel_pos_h", 2 * extent - 1, head_dim)
        table.parameter("attn", "rel_pos_w", 2 * extent - 1, head_dim)
    table.linear("mlp.lin1", size, inner)
    table.linear("mlp.lin2", inner, size)


BLOCKS = [1, 2, 7, 2]
WIDTHS = [96, 192, 384, 768]
WINDOWS = [8, 4, 14, 7]
BACKGROUND = (7, 7)
PATCH_KERNEL = 7
"""What ``Sam2HieraDetConfig`` takes where the config has none."""


def hiera(table: ParameterTable, name: str, reader: ConfigReader) -> list[int]:
    """``Sam2HieraDetModel``: the first block of a stage widens; gives the widths of the stages."""
    blocks = reader.integers("blocks_per_stage", minimum=1) or BLOCKS
    count = len(blocks)
    has_widths = reader.raw("embed_dim_per_stage") is not None
    widths = each_stage(reader, "embed_dim_per_stage", count) if has_widths else WIDTHS
    window = (reader.integers("window_size_per_stage") or WINDOWS)[0]
    size = reader.integer("hidden_size")
    background = "window_positional_embedding_background_size"
    has_background = reader.raw(background) is not None
    height, width = pair(reader, background) if has_background else BACKGROUND
    has_kernel = reader.raw("patch_kernel_size") is not None
    kernel = pair(reader, "patch_kernel_size") if has_kernel else (PATCH_KERNEL, PATCH_KERNEL)
    with table.block(f"{name}.embed"):
        table.convolution("patch_embed", reader.integer("num_channels"), size, *kernel)
        table.parameter("backbone", "pos_embed", 1, size, height, width)
        table.parameter("backbone", "pos_embed_window", 1, size, window, window)
    times = ratio(reader, "mlp_ratio", default=4)
    before = widths[0]
    for index, (number, after) in enumerate(zip(blocks, widths, strict=True)):
        with table.block(f"{name}.stages.{index}.first"):
            _hiera_block(table, before, after, int(after * times))
        with table.block(f"{name}.stages.{index}.rest", count=number - 1):
            _hiera_block(table, after, after, int(after * times))
        before = after
    return widths


def _hiera_block(table: ParameterTable, before: int, after: int, inner: int) -> None:
    table.norm("layer_norm1", before)
    table.linear("attn.qkv", before, 3 * after)
    table.linear("attn.proj", after, after)
    table.norm("layer_norm2", after)
    table.linear("mlp.proj_in", after, inner)
    table.linear("mlp.proj_out", inner, after)
    if before != after:
        table.linear("proj", before, after)


def sam2_vision(
    table: ParameterTable, name: str, reader: ConfigReader, backbone: ConfigReader
) -> None:
    """``Sam2VisionModel``: Hiera, and a convolution on each stage to one width."""
    widths = hiera(table, f"{name}.backbone", backbone)
    channels = reader.integers("backbone_channel_list", minimum=1) or widths[::-1]
    out, kernel = reader.integer("fpn_hidden_size"), reader.integer("fpn_kernel_size")
    with table.block(f"{name}.neck"):
        for index, size in enumerate(channels):
            table.convolution(f"neck.convs.{index}", size, out, kernel, kernel)
