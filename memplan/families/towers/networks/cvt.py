"""CvT's stages: queries, keys and values pass a depthwise convolution before they are projected."""

from memplan.families.towers.networks.pvt import PICTURE
from memplan.families.towers.networks.pyramid_parts import declare_network, network, normed
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import each_stage, stage_flags, stage_ratios
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.gridded.grids import (
    ConvolvedAttentionBody,
    ForgottenBody,
    NamedBody,
    TokenBody,
)
from memplan.model.towers.gridded.nets import ConvolutionBody, DropoutBody, DropPathBody, PixelsBody
from memplan.model.towers.parts import NormBody


def cvt_stages(table: ParameterTable, reader: ConfigReader, sizes: list[int]) -> None:
    """All stages; a class token stands in those that ask for one."""
    before, count = reader.integer("num_channels"), len(sizes)
    kernels = each_stage(reader, "patch_sizes", count)
    strides = each_stage(reader, "patch_stride", count)
    padding = each_stage(reader, "patch_padding", count, minimum=0)
    tokens = stage_flags(reader, "cls_token", count)
    drops = stage_ratios(reader, "drop_rate", count)
    for index, size in enumerate(sizes):
        kernel = kernels[index]
        parts: tuple[TowerBody, ...] = (
            ConvolutionBody(
                module="embedding", kernel=kernel, stride=strides[index],
                padding=2 * padding[index], bias=True,
            ),
            NormBody(module="embed_norm", size=size),
            DropoutBody(probability=drops[index]),
        )  # fmt: skip
        if not index:
            parts = (PixelsBody(channels=before, image=(PICTURE, PICTURE)), *parts)
        else:
            # The encoder's variable holds what a stage reads until it returns.
            parts = (*((ForgottenBody(),) if index > 1 else ()), NamedBody(), *parts)
        if tokens[index]:
            parts = (*parts, TokenBody(size=size, token="stage.cls_token"))
        written = _is_written(reader, count, index)
        with table.block(f"stages.{index}.embed", body=ChainBody(parts=parts) if written else None):
            if tokens[index]:
                table.parameter("stage", "cls_token", 1, 1, sizes[-1])
            table.convolution("embedding", before, size, kernel, kernel)
            table.norm("embed_norm", size)
        body = _layer_body(reader, index, count) if written else None
        depth = each_stage(reader, "depth", count)[index]
        if depth <= index:
            # ``drop_path_rates[self.stage]``.
            error = reader.fail("depth", f"{depth}: the class asks stage {index} for layer {index}")
            raise error
        with table.block(f"stages.{index}.layers", count=depth, body=body):
            _layer(table, reader, index, count)
        before = size


def _methods(reader: ConfigReader, count: int) -> list[str]:
    methods = reader.texts("qkv_projection_method")
    if len(methods) < count:
        error = reader.fail("qkv_projection_method", f"must name {count} methods")
        raise error
    return methods


def _is_written(reader: ConfigReader, count: int, index: int) -> bool:
    """Whether a stage projects by depthwise convolutions, and its token, if any, is the last's."""
    tokens = stage_flags(reader, "cls_token", count)
    return _methods(reader, count)[index] == "dw_bn" and (index + 1 == count or not tokens[index])


def _layer_body(reader: ConfigReader, index: int, count: int) -> TowerBody:
    """``CvtLayer``: the second sum is itself dropped by samples.

    A stage's layers all have the share of the one whose number is the stage's (``CvtStage``).
    """
    size = each_stage(reader, "embed_dim", count)[index]
    heads = each_stage(reader, "num_heads", count)[index]
    reader.divide("embed_dim", size, "num_heads", heads)
    drop = stage_ratios(reader, "drop_rate", count)[index]
    mixed = ConvolvedAttentionBody(
        module="attn", size=size, num_heads=heads,
        kernel=each_stage(reader, "kernel_qkv", count)[index],
        query_stride=each_stage(reader, "stride_q", count)[index],
        query_padding=2 * each_stage(reader, "padding_q", count, minimum=0)[index],
        key_stride=each_stage(reader, "stride_kv", count)[index],
        key_padding=2 * each_stage(reader, "padding_kv", count, minimum=0)[index],
        bias=stage_flags(reader, "qkv_bias", count)[index],
        has_token=stage_flags(reader, "cls_token", count)[index],
        dropout=stage_ratios(reader, "attention_drop_rate", count)[index], output_dropout=drop,
    )  # fmt: skip
    inner = int(size * stage_ratios(reader, "mlp_ratio", count)[index])
    fed = network("mlp", size, inner, Activation.GELU, dropout=drop, inner_dropout=False)
    drops = index > 0 and stage_ratios(reader, "drop_path_rate", count)[index] > 0
    parts: tuple[TowerBody, ...] = (
        normed("layernorm_before", size, mixed, drops=drops, names_branch=True),
        normed("layernorm_after", size, fed),
    )
    return ChainBody(parts=(*parts, DropPathBody()) if drops else parts)


def _layer(table: ParameterTable, reader: ConfigReader, index: int, count: int) -> None:
    size = each_stage(reader, "embed_dim", count)[index]
    kernel = each_stage(reader, "kernel_qkv", count)[index]
    if _methods(reader, count)[index] == "dw_bn":
        for each in ("query", "key", "value"):
            name = f"attn.convolution_{each}"
            table.convolution(name, size, size, kernel, kernel, groups=size, bias=False)
            table.norm(f"{name}.norm", size)
    attention(table, "attn", size, bias=stage_flags(reader, "qkv_bias", count)[index])
    table.norm("layernorm_before", size)
    table.norm("layernorm_after", size)
    inner = int(size * stage_ratios(reader, "mlp_ratio", count)[index])
    declare_network(table, "mlp", size, inner)
