"""CLIP's and SigLIP's towers for images."""

from dataclasses import replace

from memplan.families.towers.layers import (
    in_place_attention,
    perceptron,
    tower_activation,
    transformer,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.compared.pooling import AttentionPoolerBody
from memplan.model.towers.parts import NormBody
from memplan.model.towers.patches import PatchesBody, Positions


def patches_across(reader: ConfigReader) -> int:
    """Patches along one side of a square image."""
    patch_size = reader.integer("patch_size")
    count = reader.integer("image_size") // patch_size
    if not count:
        error = reader.fail("image_size", f"is smaller than patch_size ({patch_size})")
        raise error
    return count


def _patches(
    reader: ConfigReader, *, tokens: tuple[str, ...] = (), bias: bool = True
) -> PatchesBody:
    side, patch = reader.integer("image_size"), reader.integer("patch_size")
    return PatchesBody(
        size=reader.integer("hidden_size"), channels=reader.integer("num_channels"),
        image=(side, side), patch=(patch, patch), projection="patch_embedding", bias=bias,
        tokens=tokens, positions=Positions.TABLE, position_module="position_embedding",
        names_patches=True,
    )  # fmt: skip


def siglip_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``SiglipVisionModel``: patches without a class token, pooled by attention where asked for."""
    size, patch_size = reader.integer("hidden_size"), reader.integer("patch_size")
    channels = reader.integer("num_channels")
    patches = replace(_patches(reader), by_channel=True)
    with table.block(f"{name}.embed", body=patches):
        table.convolution("patch_embedding", channels, size, patch_size, patch_size)
        table.embedding("position_embedding", patches_across(reader) ** 2, size)
    _siglip_layers(table, name, reader)


def _siglip_layers(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    size = reader.integer("hidden_size")
    transformer(table, f"{name}.encoder", reader)
    with table.block(f"{name}.norm", body=NormBody(module="post_layer_norm", size=size)):
        table.norm("post_layer_norm", size)
    if reader.flag("vision_use_head", default=True):
        inner = reader.integer("intermediate_size")
        body = AttentionPoolerBody(
            size=size, inner_size=inner, num_heads=reader.integer("num_attention_heads"),
            activation=tower_activation(reader, "hidden_act"), module="head",
        )  # fmt: skip
        with table.block(f"{name}.pooler", body=body):
            table.parameter("head", "probe", 1, 1, size)
            in_place_attention(table, "head.attention", size)
            table.norm("head.layernorm", size)
            perceptron(table, "head.mlp", size, reader.integer("intermediate_size"))
