"""Swin Transformer V2: attention in shifted windows, patches merged between stages."""

from memplan.families.towers.layers import perceptron
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import at_least_one, each_stage, ratio
from memplan.families.towers.vit import num_patches, patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable

POSITION_WIDTH = 512
"""Inside the network that makes position biases (``Swinv2SelfAttention``)."""


def swin_size(reader: ConfigReader) -> int:
    """Width of the last stage."""
    return int(reader.integer("embed_dim") * 2 ** (len(_depths(reader)) - 1))


def _depths(reader: ConfigReader) -> list[int]:
    return at_least_one(reader, "depths")


def swin_v2_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, masked: bool = False
) -> None:
    """The model without its last norm."""
    width = reader.integer("embed_dim")
    with table.block(f"{name}.embed"):
        patch_projection(table, reader, width)
        table.norm("embed_norm", width)
        if masked:
            table.parameter("embeddings", "mask_token", 1, 1, width)
        if reader.flag("use_absolute_embeddings"):
            positions = num_patches(reader) + 1
            table.parameter("embeddings", "position_embeddings", 1, positions, width)
    depths = _depths(reader)
    heads = each_stage(reader, "num_heads", len(depths))
    for index, depth in enumerate(depths):
        size = width * 2**index
        reader.divide("embed_dim", size, "num_heads", heads[index])
        with table.block(f"{name}.stages.{index}.layers", count=depth):
            _layer(table, reader, size, heads[index])
        if index + 1 < len(depths):
            with table.block(f"{name}.stages.{index}.downsample"):
                table.linear("downsample.reduction", 4 * size, 2 * size, bias=False)
                table.norm("downsample.norm", 2 * size)


def _layer(table: ParameterTable, reader: ConfigReader, size: int, heads: int) -> None:
    bias = reader.flag("qkv_bias", default=True)
    attention(table, "self_attn", size, bias=bias, key_bias=False)
    table.parameter("self_attn", "logit_scale", heads, 1, 1)
    table.linear("self_attn.position_mlp.0", 2, POSITION_WIDTH)
    table.linear("self_attn.position_mlp.2", POSITION_WIDTH, heads, bias=False)
    table.norm("layernorm_before", size)
    table.norm("layernorm_after", size)
    perceptron(table, "mlp", size, int(size * ratio(reader, "mlp_ratio", default=4)))
