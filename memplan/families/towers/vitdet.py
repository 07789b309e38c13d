"""ViTDet: a plain Vision Transformer as a backbone, with attention in windows."""

from itertools import groupby
from math import isqrt

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.networks.pyramid_parts import declare_network, network, normed
from memplan.families.towers.parts import fused_attention
from memplan.families.towers.sizes import pair, ratio
from memplan.families.towers.vit import patch_projection
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.matting import (
    ChannelNormBody,
    ResizedPlacesBody,
    WindowedScoresBody,
)
from memplan.model.towers.gridded.nets import ConvolutionBody, PixelsBody
from memplan.model.towers.parts import ActivationBody


def vitdet_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``VitDetBackbone``: no last norm; convolutions behind some layers."""
    size, channels = reader.integer("hidden_size"), reader.integer("num_channels")
    height, width = pair(reader, "pretrain_image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    fewer = ConvolutionBody(
        module="patch_embeddings", kernel=patch_height, stride=patch_height, bias=True
    )
    parts: tuple[TowerBody, ...] = (
        PixelsBody(channels=channels, image=pair(reader, "image_size")),
        fewer,
    )
    with table.block(f"{name}.embed"):
        patch_projection(table, reader, size)
        if reader.flag("use_absolute_position_embeddings"):
            positions = (height // patch_height) * (width // patch_width) + 1
            table.parameter("embeddings", "position_embeddings", 1, positions, size)
            side = isqrt(positions - 1)
            places = "embeddings.position_embeddings"
            parts = (*parts, ResizedPlacesBody(size=size, positions=places, side=side))
        table.computes(ChainBody(parts=parts) if _is_written(reader) else None)
    windows = reader.integer("window_size", minimum=0)
    windowed = set(reader.integers("window_block_indices")) if windows else set()
    residual = set(reader.integers("residual_block_indices"))
    drops = reader.number("drop_path_rate", default=0.0) > 0
    kinds = [
        (number in windowed, number in residual, drops and number > 0)
        for number in range(reader.layers("num_hidden_layers"))
    ]
    for (in_windows, convolved, dropped), group in groupby(kinds):
        window = windows if in_windows else 0
        with table.block(f"{name}.layers", count=len(list(group))):
            _layer(table, reader, window, convolved=convolved, drops=dropped)


def _is_written(reader: ConfigReader) -> bool:
    """Whether patches and positions are squares, and the last layer's result is what is read."""
    height, width = pair(reader, "pretrain_image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    last = f"stage{reader.layers('num_hidden_layers')}"
    named = reader.texts("out_features") or [last]
    return height == width and patch_height == patch_width and named[-1] == last


def _layer(
    table: ParameterTable, reader: ConfigReader, window: int, *, convolved: bool, drops: bool
) -> None:
    """``VitDetLayer``."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    reader.divide("hidden_size", size, "num_attention_heads", heads)
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    bias = reader.flag("qkv_bias", default=True)
    relative = reader.flag("use_relative_position_embeddings")
    active = tower_activation(reader, "hidden_act")
    table.norm("norm1", size)
    fused_attention(table, "self_attn", size, bias=bias)
    if relative:
        _relative_positions(table, reader, window)
    table.norm("norm2", size)
    declare_network(table, "mlp", size, inner)
    mixed = WindowedScoresBody(
        module="self_attn", size=size, num_heads=heads, window=window, relative=relative, bias=bias
    )
    drop = reader.number("dropout_prob", default=0.0)
    parts: tuple[TowerBody, ...] = (
        normed("norm1", size, mixed, drops=drops),
        normed("norm2", size, network("mlp", size, inner, active, dropout=drop), drops=drops),
    )
    if convolved:
        parts = (*parts, _residual(table, size, active))
    table.computes(ChainBody(parts=parts))


def _relative_positions(table: ParameterTable, reader: ConfigReader, window: int) -> None:
    """A row for each distance within a window, or within the whole image."""
    height, width = pair(reader, "image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    rows = window or height // patch_height
    columns = window or width // patch_width
    head_dim = reader.integer("hidden_size") // reader.integer("num_attention_heads")
    table.parameter("self_attn", "rel_pos_h", 2 * rows - 1, head_dim)
    table.parameter("self_attn", "rel_pos_w", 2 * columns - 1, head_dim)


def _residual(table: ParameterTable, size: int, active: Activation) -> TowerBody:
    """``VitDetResBottleneckBlock``: half as wide inside."""
    half = size // 2
    branch: list[TowerBody] = []
    for number, (before, after, kernel) in enumerate(
        ((size, half, 1), (half, half, 3), (half, size, 1)), 1
    ):
        table.convolution(f"residual.conv{number}", before, after, kernel, kernel, bias=False)
        table.norm(f"residual.norm{number}", after)
        branch += [
            ConvolutionBody(
                module=f"residual.conv{number}", kernel=kernel, padding=kernel // 2 * 2
            ),
            ChannelNormBody(module=f"residual.norm{number}", size=after),
        ]
        if number < 3:
            branch.append(ActivationBody(activation=active))
    return ResidualBody(branch=tuple(branch))
