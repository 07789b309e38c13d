"""CLIP's and SigLIP's towers for images."""

from dataclasses import replace
from math import isqrt

from memplan.families.towers.layers import (
    in_place_attention,
    perceptron,
    tower_activation,
    transformer,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.compared.pooling import AttentionPoolerBody, PoolerBody
from memplan.model.towers.parts import NormBody, SpareBody
from memplan.model.towers.patches import Cut, PatchesBody, Positions


def patches_across(reader: ConfigReader) -> int:
    """Patches along one side of a square image."""
    patch_size = reader.integer("patch_size")
    count = reader.integer("image_size") // patch_size
    if not count:
        error = reader.fail("image_size", f"is smaller than patch_size ({patch_size})")
        raise error
    return count


def clip_vision(
    table: ParameterTable, name: str, reader: ConfigReader, *, pooled: bool = True
) -> None:
    """``CLIPVisionModel``: patches behind a class token, a norm before and after the layers.

    The norm after them is the first token's alone, and serves nothing where that is not ``pooled``.
    """
    size, patch_size = reader.integer("hidden_size"), reader.integer("patch_size")
    patches = _patches(reader, tokens=("embeddings.class_embedding",), bias=False)
    with table.block(f"{name}.embed", body=patches):
        table.parameter("embeddings", "class_embedding", size)
        table.convolution(
            "patch_embedding", reader.integer("num_channels"), size, patch_size, patch_size,
            bias=False,
        )  # fmt: skip
        table.embedding("position_embedding", patches_across(reader) ** 2 + 1, size)
    with table.block(f"{name}.norms", body=NormBody(module="pre_layer_norm", size=size)):
        table.norm("pre_layer_norm", size)
    transformer(table, f"{name}.encoder", reader, cuts_together=True)
    first = PoolerBody(size=size, norm="post_layer_norm")
    with table.block(f"{name}.norm", body=first if pooled else SpareBody()):
        table.norm("post_layer_norm", size)


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


def siglip2_vision(
    table: ParameterTable, name: str, reader: ConfigReader, *, times: int = 2
) -> None:
    """``Siglip2VisionModel``: patches come cut out, and the table's number of them is in the config.

    Pictures have ``times`` as many across as the table, where the setup says nothing else.
    """
    size = reader.integer("hidden_size")
    patch, rows = reader.integer("patch_size"), reader.integer("num_patches")
    features, side = reader.integer("num_channels") * patch**2, times * isqrt(rows) * patch
    patches = PatchesBody(
        size=size, channels=reader.integer("num_channels"), image=(side, side),
        patch=(patch, patch), projection="patch_embedding", cut=Cut.FLAT,
        positions=Positions.RESIZED, position_module="position_embedding",
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        table.linear("patch_embedding", features, size)
        table.embedding("position_embedding", rows, size)
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
