"""ViTDet: a plain Vision Transformer as a backbone, with attention in windows."""

from collections import Counter

from memplan.families.towers.layers import perceptron
from memplan.families.towers.parts import fused_attention
from memplan.families.towers.sizes import pair, ratio
from memplan.families.towers.vit import patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def vitdet_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``VitDetBackbone``: no last norm; convolutions behind some layers."""
    size = reader.integer("hidden_size")
    height, width = pair(reader, "pretrain_image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    with table.block(f"{name}.embed"):
        patch_projection(table, reader, size)
        if reader.flag("use_absolute_position_embeddings"):
            positions = (height // patch_height) * (width // patch_width) + 1
            table.parameter("embeddings", "position_embeddings", 1, positions, size)
    count = reader.layers("num_hidden_layers")
    windows = reader.integer("window_size", minimum=0)
    windowed = set(reader.integers("window_block_indices")) if windows else set()
    residual = set(reader.integers("residual_block_indices"))
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    kinds = Counter((index in windowed, index in residual) for index in range(count))
    for (in_windows, convolved), number in kinds.items():
        with table.block(f"{name}.layers", count=number):
            table.norm("norm1", size)
            fused_attention(table, "self_attn", size, bias=reader.flag("qkv_bias", default=True))
            if reader.flag("use_relative_position_embeddings"):
                _relative_positions(table, reader, windows if in_windows else 0)
            table.norm("norm2", size)
            perceptron(table, "mlp", size, inner)
            if convolved:
                _residual(table, size)


def _relative_positions(table: ParameterTable, reader: ConfigReader, window: int) -> None:
    """A row for each distance within a window, or within the whole image."""
    height, width = pair(reader, "image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    rows = window or height // patch_height
    columns = window or width // patch_width
    head_dim = reader.integer("hidden_size") // reader.integer("num_attention_heads")
    table.parameter("self_attn", "rel_pos_h", 2 * rows - 1, head_dim)
    table.parameter("self_attn", "rel_pos_w", 2 * columns - 1, head_dim)


def _residual(table: ParameterTable, size: int) -> None:
    """``VitDetResBottleneckBlock``: half as wide inside."""
    half = size // 2
    table.convolution("residual.conv1", size, half, 1, 1, bias=False)
    table.norm("residual.norm1", half)
    table.convolution("residual.conv2", half, half, 3, 3, bias=False)
    table.norm("residual.norm2", half)
    table.convolution("residual.conv3", half, size, 1, 1, bias=False)
    table.norm("residual.norm3", size)
