"""The Vision Transformer and its kin, as towers for images."""

from dataclasses import replace

from memplan.families.towers.layers import encoder_attention, perceptron, tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import pair, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.layers import LayerBody, LayerNames
from memplan.model.towers.parts import NormBody
from memplan.model.towers.patches import PatchesBody, Positions


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
    with table.block(f"{name}.embed", body=_patches(reader, kind)):
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
    body = _layer(reader, kind)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers"), body=body):
        vit_layer(table, reader, kind)
    with table.block(f"{name}.norm", body=NormBody(module="layernorm", size=size)):
        table.norm("layernorm", size)
    if pooled:
        width = reader.integer("pooler_output_size", default=size)
        first = PoolerBody(
            pooling=TowerPooling.FIRST, size=size, linear="pooler.dense", outputs=width,
            activation=tower_activation(reader, "pooler_act", default="tanh"),
        )  # fmt: skip
        with table.block(f"{name}.pooler", body=first):
            table.linear("pooler.dense", size, width)


def _patches(reader: ConfigReader, kind: VitKind) -> PatchesBody:
    registers = reader.integer("num_register_tokens", minimum=0) if kind.registers else 0
    return PatchesBody(
        size=reader.integer("hidden_size"), channels=reader.integer("num_channels"),
        image=pair(reader, "image_size"), patch=pair(reader, "patch_size"),
        projection="patch_embeddings", tokens=tuple(f"embeddings.{each}" for each in kind.tokens),
        registers="embeddings.register_tokens" if registers else "", num_registers=registers,
        positions=Positions.PARAMETER, position_module="embeddings.position_embeddings",
        dropout=reader.number("hidden_dropout_prob", default=0.0),
    )  # fmt: skip


def _layer(reader: ConfigReader, kind: VitKind) -> LayerBody:
    size = reader.integer("hidden_size")
    gated = kind.scaled and reader.flag("use_swiglu_ffn")
    names = _SCALED if kind.scaled else _PLAIN
    if gated:
        names = replace(names, gate="gate_proj", up="up_proj", down="down_proj")
    bias = reader.flag("qkv_bias", default=True)
    attention = encoder_attention(
        reader, size, bias=bias, dropout=reader.number("attention_probs_dropout_prob", default=0.0),
        fp32_softmax=not kind.scaled,
    )  # fmt: skip
    activation = Activation.SILU if gated else tower_activation(reader, "hidden_act")
    return LayerBody(
        size=size, inner_size=network_size(reader, kind), attention=attention,
        activation=activation, names=names,
        dropout=0.0 if kind.scaled else reader.number("hidden_dropout_prob", default=0.0),
        drop_path=kind.scaled and reader.number("drop_path_rate", default=0.0) > 0,
    )  # fmt: skip


_PLAIN = LayerNames(output="o_proj", first_norm="layernorm_before", second_norm="layernorm_after")
_SCALED = replace(_PLAIN, first_scale="layer_scale1.lambda1", second_scale="layer_scale2.lambda1")


def network_size(reader: ConfigReader, kind: VitKind) -> int:
    """Width inside a layer's network; DINOv2's is a ratio, two thirds of it where it is gated."""
    if not kind.scaled:
        return reader.integer("intermediate_size")
    inner = int(reader.integer("hidden_size") * ratio(reader, "mlp_ratio", default=4))
    if reader.flag("use_swiglu_ffn"):
        return (inner * 2 // 3 + 7) // 8 * 8
    return inner


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
    inner = network_size(reader, kind)
    if reader.flag("use_swiglu_ffn"):
        for each in ("gate_proj", "up_proj"):
            table.linear(f"mlp.{each}", size, inner)
        table.linear("mlp.down_proj", inner, size)
    else:
        perceptron(table, "mlp", size, inner)


def vit_model(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``AutoModel``'s class of the config's own type."""
    kind = VIT_TOWERS[reader.text("model_type")]
    vit_tower(table, name, reader, kind, pooled=kind.pooled)
