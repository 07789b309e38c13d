"""CLIP's and SigLIP's towers for texts and images."""

from memplan.families.towers.layers import (
    in_place_attention,
    perceptron,
    transformer,
)
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def clip_text(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``CLIPTextModel``: tokens, learned positions, layers, a final norm."""
    size = reader.integer("hidden_size")
    with table.block(f"{name}.embed"):
        table.embedding("token_embedding", reader.integer("vocab_size"), size)
        table.embedding("position_embedding", reader.integer("max_position_embeddings"), size)
    transformer(table, f"{name}.encoder", reader)
    with table.block(f"{name}.norm"):
        table.norm("final_layer_norm", size)


def siglip_text(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``SiglipTextModel``: CLIP's with a linear layer on the last token."""
    clip_text(table, name, reader)
    size = reader.integer("hidden_size")
    with table.block(f"{name}.pooler"):
        table.linear("head", size, reader.integer("projection_size", default=size))


def patches_across(reader: ConfigReader) -> int:
    """Patches along one side of a square image."""
    patch_size = reader.integer("patch_size")
    count = reader.integer("image_size") // patch_size
    if not count:
        error = reader.fail("image_size", f"is smaller than patch_size ({patch_size})")
        raise error
    return count


def clip_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``CLIPVisionModel``: patches behind a class token, a norm before and after the layers."""
    size, patch_size = reader.integer("hidden_size"), reader.integer("patch_size")
    with table.block(f"{name}.embed"):
        table.parameter("embeddings", "class_embedding", size)
        table.convolution(
            "patch_embedding", reader.integer("num_channels"), size, patch_size, patch_size,
            bias=False,
        )  # fmt: skip
        table.embedding("position_embedding", patches_across(reader) ** 2 + 1, size)
    with table.block(f"{name}.norms"):
        table.norm("pre_layer_norm", size)
        table.norm("post_layer_norm", size)
    transformer(table, f"{name}.encoder", reader)


def siglip_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``SiglipVisionModel``: patches without a class token, pooled by attention where asked for."""
    size, patch_size = reader.integer("hidden_size"), reader.integer("patch_size")
    channels = reader.integer("num_channels")
    with table.block(f"{name}.embed"):
        table.convolution("patch_embedding", channels, size, patch_size, patch_size)
        table.embedding("position_embedding", patches_across(reader) ** 2, size)
    _siglip_layers(table, name, reader)


def siglip2_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``Siglip2VisionModel``: patches come cut out, and their greatest number is in the config."""
    size = reader.integer("hidden_size")
    features = reader.integer("num_channels") * reader.integer("patch_size") ** 2
    with table.block(f"{name}.embed"):
        table.linear("patch_embedding", features, size)
        table.embedding("position_embedding", reader.integer("num_patches"), size)
    _siglip_layers(table, name, reader)


def _siglip_layers(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    size = reader.integer("hidden_size")
    transformer(table, f"{name}.encoder", reader)
    with table.block(f"{name}.norm"):
        table.norm("post_layer_norm", size)
    if reader.flag("vision_use_head", default=True):
        with table.block(f"{name}.pooler"):
            table.parameter("head", "probe", 1, 1, size)
            in_place_attention(table, "head.attention", size)
            table.norm("head.layernorm", size)
            perceptron(table, "head.mlp", size, reader.integer("intermediate_size"))
