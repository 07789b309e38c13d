"""Segment Anything's encoder of images: a ViT with attention in windows."""

from dataclasses import replace
from itertools import groupby

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import fused_attention
from memplan.families.towers.sizes import pair, ratio
from memplan.families.towers.vit import patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.gridded.segmenting import MaskNeckBody, WindowedLayerBody
from memplan.model.towers.patches import PatchesBody, Positions


def sam_vision(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    *,
    written_out: bool = False,
) -> None:
    """``SamVisionEncoder``: relative positions in every layer, and a neck of two convolutions."""
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
    wide = set(reader.integers("global_attn_indexes"))
    for is_wide, group in groupby(range(count), wide.__contains__):
        side = 0 if is_wide else window
        body = replace(_layer_body(reader, inner, side), written_out=written_out)
        with table.block(f"{name}.layers", count=len(list(group)), body=body):
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
