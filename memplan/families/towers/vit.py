"""The Vision Transformer and its kin, as towers for images."""

from memplan.families.towers.layers import perceptron
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import pair, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


@dataclass(frozen=True, kw_only=True, slots=True)
class VitKind:
    """What a type adds to patches and layers."""

    tokens: tuple[str, ...] = ("cls_token",)
    """Tokens before the patches, each with a position of its own."""
    registers: bool = False
    """Tokens without a position follow them, ``num_register_tokens`` of them."""
    mask_token: bool = False
    """A token for masked patches, whatever the class is for."""
    pooled: bool = False
    """The bare model has a pooler."""
    scaled: bool = False
    """What a layer adds is scaled number by number, and the network's width is a ratio (DINOv2)."""


VIT_TOWERS: dict[str, VitKind] = {
    "vit": VitKind(pooled=True),
    "deit": VitKind(tokens=("cls_token", "distillation_token"), pooled=True),
    "ijepa": VitKind(tokens=()),
    "dinov2": VitKind(mask_token=True, scaled=True),
    "dinov2_with_registers": VitKind(registers=True, mask_token=True, scaled=True),
}
"""By ``model_type``."""


def num_patches(reader: ConfigReader) -> int:
    """Patches of an image."""
    height, width = pair(reader, "image_size")
    patch_height, patch_width = pair(reader, "patch_size")
    count = (height // patch_height) * (width // patch_width)
    if not count:
        error = reader.fail("image_size", "is smaller than patch_size")
        raise error
    return count


def patch_projection(table: ParameterTable, reader: ConfigReader, size: int, *frames: int) -> None:
    """The convolution that makes a vector of each patch, over ``frames`` of a video at once."""
    channels = reader.integer("num_channels")
    kernel = (*frames, *pair(reader, "patch_size"))
    table.convolution("patch_embeddings", channels, size, *kernel)


def vit_tower(
    table: ParameterTable,
    name: str,
    reader: ConfigReader,
    kind: VitKind,
    *,
    pooled: bool,
    masked: bool = False,
) -> None:
    """A bare model; ``masked`` gives it a mask token."""
    size = reader.integer("hidden_size")
    with table.block(f"{name}.embed"):
        for token in kind.tokens:
            table.parameter("embeddings", token, 1, 1, size)
        positions = num_patches(reader) + len(kind.tokens)
        table.parameter("embeddings", "position_embeddings", 1, positions, size)
        if kind.registers:
            registers = reader.integer("num_register_tokens", minimum=0)
            table.parameter("embeddings", "register_tokens", 1, registers, size)
        if masked or (kind.mask_token and reader.flag("use_mask_token", default=True)):
            table.parameter("embeddings", "mask_token", 1, size)
        patch_projection(table, reader, size)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers")):
        vit_layer(table, reader, kind)
    with table.block(f"{name}.norm"):
        table.norm("layernorm", size)
    if pooled:
        with table.block(f"{name}.pooler"):
            table.linear("pooler.dense", size, reader.integer("pooler_output_size", default=size))


def vit_layer(table: ParameterTable, reader: ConfigReader, kind: VitKind) -> None:
    """Attention and a feed-forward network behind a layer norm each."""
    size = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    width = heads * reader.integer("head_dim", default=size // heads)
    attention(table, "self_attn", size, bias=reader.flag("qkv_bias", default=True), inner=width)
    table.norm("layernorm_before", size)
    table.norm("layernorm_after", size)
    if not kind.scaled:
        perceptron(table, "mlp", size, reader.integer("intermediate_size"))
        return
    table.parameter("layer_scale1", "lambda1", size)
    table.parameter("layer_scale2", "lambda1", size)
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    if reader.flag("use_swiglu_ffn"):
        gated = (inner * 2 // 3 + 7) // 8 * 8
        for each in ("gate_proj", "up_proj"):
            table.linear(f"mlp.{each}", size, gated)
        table.linear("mlp.down_proj", gated, size)
    else:
        perceptron(table, "mlp", size, inner)


def vit_model(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``AutoModel``'s class of the config's own type."""
    kind = VIT_TOWERS[reader.text("model_type")]
    vit_tower(table, name, reader, kind, pooled=kind.pooled)
