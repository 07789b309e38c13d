"""PVT's stages, and the Mix Transformer's: keys and values come from a smaller picture."""

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.networks.pyramid_parts import (
    declare_network,
    dropping,
    network,
    normed,
)
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import each_stage, stage_ratios
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.projecting import CopiedBody
from memplan.model.towers.gridded.grids import DepthwiseBody, PlacedBody, ReducedAttentionBody
from memplan.model.towers.gridded.levels import LevelBody
from memplan.model.towers.gridded.nets import ConvolutionBody, PixelsBody
from memplan.model.towers.parts import NormBody

PICTURE = 224
"""What pictures are cut to, where a config does not say it [pixels]."""


def pvt_stages(table: ParameterTable, reader: ConfigReader, sizes: list[int]) -> None:
    """PVT's: learned positions in every stage, a class token in the last."""
    count = len(sizes)
    for index, size in enumerate(sizes):
        with table.block(f"stages.{index}.embed"):
            _pvt_embeddings(table, reader, sizes, index)
        _layers(
            table, reader, index, size,
            reduction=each_stage(reader, "sequence_reduction_ratios", count)[index],
            inner=int(size * stage_ratios(reader, "mlp_ratios", count)[index]),
            bias=reader.flag("qkv_bias", default=True), convolved=False, name=f"stages.{index}.layers",
            count=count,
        )  # fmt: skip


def _pvt_embeddings(
    table: ParameterTable, reader: ConfigReader, sizes: list[int], index: int
) -> None:
    """``PvtPatchEmbeddings``: the stride is the kernel's size, positions are counted in patches."""
    size, last = sizes[index], index + 1 == len(sizes)
    before = sizes[index - 1] if index else reader.integer("num_channels")
    kernel = each_stage(reader, "strides", len(sizes))[index]
    patch_size = each_stage(reader, "patch_sizes", len(sizes))[index]
    side = reader.integer("image_size")
    image_size = side // (2 ** (index + 1) if index else 1)
    positions = (image_size // patch_size) ** 2 + last
    table.parameter("embeddings", "position_embeddings", 1, positions, size)
    if last:
        table.parameter("embeddings", "cls_token", 1, 1, size)
    table.convolution("projection", before, size, kernel, kernel)
    table.norm("embed_norm", size)
    placed = PlacedBody(
        size=size, positions="embeddings.position_embeddings",
        token="embeddings.cls_token" if last else "",
        dropout=reader.number("hidden_dropout_prob", default=0.0),
    )  # fmt: skip
    parts: tuple[TowerBody, ...] = (
        _first(reader, index, side),
        ConvolutionBody(module="projection", kernel=kernel, stride=patch_size, bias=True),
        NormBody(module="embed_norm", size=size),
        placed,
    )
    table.computes(ChainBody(parts=parts))


def _first(reader: ConfigReader, index: int, side: int) -> TowerBody:
    """What a stage's convolution reads: the picture, or rows laid out as one again."""
    if index:
        return CopiedBody()
    return PixelsBody(channels=reader.integer("num_channels"), image=(side, side), fixed=True)


def _layers(
    table: ParameterTable,
    reader: ConfigReader,
    index: int,
    size: int,
    *,
    reduction: int,
    inner: int,
    bias: bool,
    convolved: bool,
    name: str,
    count: int,
) -> None:
    """``PvtLayer`` and ``GLPNLayer``."""
    heads = each_stage(reader, "num_attention_heads", count)[index]
    reader.divide("hidden_sizes", size, "num_attention_heads", heads)
    drop = reader.number("hidden_dropout_prob", default=0.0)
    mixed = ReducedAttentionBody(
        module="attn", size=size, num_heads=heads, reduction=reduction, bias=bias,
        dropout=reader.number("attention_probs_dropout_prob", default=0.0), output_dropout=drop,
    )  # fmt: skip
    between = (DepthwiseBody(module="mlp.dwconv", kernel=3),) if convolved else ()
    fed = network(
        "mlp", size, inner, tower_activation(reader, "hidden_act"), dropout=drop, between=between
    )
    depth = each_stage(reader, "depths", count)[index]
    drops = reader.number("drop_path_rate", default=0.0) > 0
    for number, dropped in dropping(depth, is_first=index == 0, drops=drops):
        parts = (
            normed("layer_norm_1", size, mixed, drops=dropped, names_branch=True),
            normed("layer_norm_2", size, fed, drops=dropped),
        )
        with table.block(name, count=number, body=ChainBody(parts=parts)):
            _declare_reduced(table, size, reduction, bias=bias)
            declare_network(table, "mlp", size, inner)
            if convolved:
                table.convolution("mlp.dwconv", inner, inner, 3, 3, groups=inner)


def _declare_reduced(table: ParameterTable, size: int, reduction: int, *, bias: bool) -> None:
    attention(table, "attn", size, bias=bias)
    if reduction > 1:
        table.convolution("attn.sequence_reduction", size, size, reduction, reduction)
        table.norm("attn.layer_norm", size)
    table.norm("layer_norm_1", size)
    table.norm("layer_norm_2", size)


def mix_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """The Mix Transformer: a depthwise convolution inside each feed-forward network."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)
    strides = each_stage(reader, "strides", count)
    before = reader.integer("num_channels")
    for index, size in enumerate(sizes):
        kernel = each_stage(reader, "patch_sizes", count)[index]
        fewer = ConvolutionBody(
            module="projection", kernel=kernel, stride=strides[index], padding=kernel // 2 * 2,
            bias=True,
        )  # fmt: skip
        norm = NormBody(module="embed_norm", size=size)
        parts: tuple[TowerBody, ...] = (fewer, norm)
        if not index:
            pixels = PixelsBody(channels=before, image=(PICTURE, PICTURE))
            parts = (pixels, *parts)
        with table.block(f"{name}.stages.{index}.embed", body=ChainBody(parts=parts)):
            table.convolution("projection", before, size, kernel, kernel)
            table.norm("embed_norm", size)
        inner = int(size * stage_ratios(reader, "mlp_ratios", count)[index])
        if not inner:
            error = reader.fail("mlp_ratios", "leaves a feed-forward network no width")
            raise error
        _layers(
            table, reader, index, size, reduction=each_stage(reader, "sr_ratios", count)[index],
            inner=inner, bias=True, convolved=True, name=f"{name}.stages.{index}.layers", count=count,
        )  # fmt: skip
        last = ChainBody(
            parts=(NormBody(module="layer_norm", size=size), CopiedBody(), LevelBody())
        )
        with table.block(f"{name}.stages.{index}.norm", body=last):
            table.norm("layer_norm", size)
        before = size
