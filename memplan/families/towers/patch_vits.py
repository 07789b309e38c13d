"""Vision transformers over patches of images and videos that keep their own proportions.

Qwen's towers and their kin: a convolution over ``temporal_patch_size`` frames, layers, and a merger
that joins neighbouring patches and ends in the language model's width. What sets the types apart is
a row of ``PATCH_VITS`` (``modeling_*.py`` of each type, transformers 5.23).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from memplan.families.towers.blocks import TowerLayer, declare_layers, layer_body
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.mergers import (
    glm_merger,
    glm_ocr_merger,
    qwen2_5_merger,
    qwen2_merger,
    qwen3_merger,
)
from memplan.families.towers.sizes import PICTURE, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.layers import Turning
from memplan.model.towers.patches import PatchesBody, Positions


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchVit:
    """How one type's class differs from Qwen2-VL's, where its config does not say so."""

    width: str = "hidden_size"
    """Which key holds the layers' width."""
    patch_bias: bool = True
    frames: bool = True
    """The patch convolution spans ``temporal_patch_size`` images."""
    norm_bias: bool = True
    """Layer norms rather than RMS norms."""
    gated: bool = False
    bias: bool | None = True
    """Of the feed-forward network; None follows ``attention_bias``."""
    attention_bias: bool | None = True
    """Of queries, keys and values; None reads ``attention_bias``."""
    output_bias: bool | None = None
    """Of attention's output; None follows the queries'."""
    head_norms: bool = False
    """RMS norms on the heads of queries and keys."""
    table: str = ""
    """Which key counts the rows of a position table; ``image_size`` for a grid of patches."""
    first_norm: bool = False
    """An RMS norm stands between the convolution and the positions."""
    merger: Callable[[ParameterTable, ConfigReader], ChainBody] | None = None


def declare_patch_vit(
    table: ParameterTable, name: str, reader: ConfigReader, model_type: str
) -> None:
    """Declare a tower of any type in ``PATCH_VITS``."""
    kind = PATCH_VITS[model_type]
    width = reader.integer(kind.width)
    patch = reader.integer("patch_size")
    frames = (reader.integer("temporal_patch_size"),) if kind.frames else ()
    written = kind.frames
    embed = _patches_body(reader, kind, width) if written else None
    with table.block(f"{name}.embed", body=embed):
        table.convolution(
            "patch_embed.proj", reader.integer("in_channels"), width, *frames, patch, patch,
            bias=kind.patch_bias,
        )  # fmt: skip
        if kind.first_norm:
            table.norm("post_conv_layernorm", width, bias=False)
        if kind.table:
            table.embedding("pos_embed", _positions(reader, kind.table), width)
    layer = _layer(reader, kind, width)
    if written:
        _written_layers(table, name, reader, layer, kind)
    else:
        declare_layers(table, f"{name}.layers", reader.layers("depth"), layer)
    if kind.merger is not None:
        own = ParameterTable()
        with own.block(f"{name}.merger"):
            body = kind.merger(own, reader)
        table.add(*(replace(block, body=body) for block in own.blocks()))


def _patches_body(reader: ConfigReader, kind: PatchVit, width: int) -> PatchesBody:
    patch, heads = reader.integer("patch_size"), reader.integer("num_heads")
    return PatchesBody(
        size=width, channels=reader.integer("in_channels"), image=PICTURE, patch=(patch, patch),
        frames=reader.integer("temporal_patch_size"), projection="patch_embed.proj",
        bias=kind.patch_bias, rotary_dim=width // heads, windowed=kind.merger is qwen2_5_merger,
        positions=_POSITIONS[kind.table], position_module="pos_embed", first_norm="post_conv_layernorm" if kind.first_norm else "",
    )  # fmt: skip


def _written_layers(
    table: ParameterTable, name: str, reader: ConfigReader, layer: TowerLayer, kind: PatchVit
) -> None:
    """Layers whose operations are known; Qwen2.5-VL's attend in windows but for a few."""
    heads, count = reader.integer("num_heads"), reader.layers("depth")
    active = tower_activation(reader, "hidden_act", default="silu" if layer.gated else "gelu")
    whole = layer_body(layer, heads, active)
    whole = replace(whole, turning=Turning.FULL, packed=True)
    if kind.merger is not qwen2_5_merger:
        declare_layers(
            table, f"{name}.layers", count, layer, heads=heads, activation=active, body=whole
        )
        return
    side = reader.integer("window_size", default=112) // reader.integer("patch_size")
    windowed = replace(whole, window=side * side)
    full = set(reader.integers("fullatt_block_indexes"))
    for is_full, group in groupby(range(count), full.__contains__):
        body = whole if is_full else windowed
        declare_layers(
            table,
            f"{name}.layers",
            len(list(group)),
            layer,
            heads=heads,
            activation=active,
            body=body,
        )


_POSITIONS = {
    "": Positions.NONE,
    "num_position_embeddings": Positions.WEIGHED,
    "image_size": Positions.SAMPLED,
}
"""By the key that counts the table's rows."""


def _positions(reader: ConfigReader, key: str) -> int:
    if key == "image_size":
        return (reader.integer(key) // reader.integer("patch_size")) ** 2
    return reader.integer(key)


def _layer(reader: ConfigReader, kind: PatchVit, width: int) -> TowerLayer:
    heads = reader.integer("num_heads")
    head_size = reader.divide(kind.width, width, "num_heads", heads)
    narrow = reader.optional_integer("num_key_value_heads")
    flag = reader.flag("attention_bias")
    return TowerLayer(
        hidden_size=width,
        intermediate_size=_inner_size(reader, kind, width),
        key_value_width=None if narrow is None else narrow * head_size,
        fused=True,
        attention_bias=flag if kind.attention_bias is None else kind.attention_bias,
        output_bias=kind.output_bias,
        head_norm_size=head_size if kind.head_norms else 0,
        norm_bias=kind.norm_bias,
        gated=kind.gated,
        bias=flag if kind.bias is None else kind.bias,
    )


def _inner_size(reader: ConfigReader, kind: PatchVit, width: int) -> int:
    """Qwen2-VL gives a ratio; GLM-4.1V's layers have the merger's output width inside."""
    if reader.raw("mlp_ratio") is not None:
        return int(width * ratio(reader, "mlp_ratio"))
    return reader.integer("out_hidden_size" if kind.merger is glm_merger else "intermediate_size")


_QWEN2_5 = PatchVit(patch_bias=False, norm_bias=False, gated=True, merger=qwen2_5_merger)
_QWEN3 = PatchVit(table="num_position_embeddings", merger=qwen3_merger)
_GLM4V = PatchVit(
    norm_bias=False, gated=True, bias=False, attention_bias=None, output_bias=False,
    table="image_size", first_norm=True, merger=glm_merger,
)  # fmt: skip

PATCH_VITS: dict[str, PatchVit] = {
    "qwen2_vl_vision": PatchVit(width="embed_dim", patch_bias=False, merger=qwen2_merger),
    "qwen2_5_vl_vision": _QWEN2_5,
    "qwen2_5_omni_vision_encoder": _QWEN2_5,
    "exaone4_5_vision": _QWEN2_5,
    "qwen3_vl_vision": _QWEN3,
    "qwen3_vl_moe_vision": _QWEN3,
    "qwen3_5_vision": _QWEN3,
    "qwen3_5_moe_vision": _QWEN3,
    "glm4v_vision": _GLM4V,
    "glm4v_moe_vision": _GLM4V,
    "glm_ocr_vision": PatchVit(
        norm_bias=False, gated=True, bias=None, attention_bias=None, head_norms=True,
        merger=glm_ocr_merger,
    ),
    "glm_image_vision": PatchVit(frames=False, attention_bias=None, table="image_size"),
}  # fmt: skip
