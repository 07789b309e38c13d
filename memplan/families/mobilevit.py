"""MobileViT: inverted residuals, and small transformers between convolutions."""

from memplan.families.classes import BARE, classifier, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.parts import convolution_norm, transformer_layer
from memplan.families.towers.sizes import each_stage, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

IMAGES = "ForImageClassification"
SEGMENTATION = "ForSemanticSegmentation"
TRANSFORMER_DEPTHS = (2, 4, 3)
"""Layers of the three transformers (``MobileViTEncoder``)."""
PLAIN_LAYERS = 3
"""Inverted residuals of the second stage."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config; segmentation leaves out the bare model's last convolution."""
    neck = each_stage(reader, "neck_hidden_sizes", 7)

    def declare(table: ParameterTable, ending: str) -> None:
        _encoder(table, reader, neck)
        if ending == SEGMENTATION:
            _segmentation_head(table, reader, request, neck[5])
            return
        with table.block("norm"):
            convolution_norm(table, "conv_1x1_exp", neck[5], neck[6], 1)
        if ending == IMAGES:
            classifier(table, "classifier", neck[6], request.labels(reader))

    return whole_model(
        reader, request, (IMAGES, BARE, SEGMENTATION), declare,
        hidden_size=neck[6], context_length=1,
    )  # fmt: skip


def _encoder(table: ParameterTable, reader: ConfigReader, neck: list[int]) -> None:
    with table.block("embed"):
        convolution_norm(table, "conv_stem", reader.integer("num_channels"), neck[0], 3)
    with table.block("stages.0"):
        _inverted(table, reader, neck[0], neck[1])
    with table.block("stages.1.first"):
        _inverted(table, reader, neck[1], neck[2])
    with table.block("stages.1.rest", count=PLAIN_LAYERS - 1):
        _inverted(table, reader, neck[2], neck[2])
    sizes = each_stage(reader, "hidden_sizes", len(TRANSFORMER_DEPTHS))
    for index, (size, depth) in enumerate(zip(sizes, TRANSFORMER_DEPTHS, strict=True)):
        _transformer_stage(table, reader, neck[index + 2], neck[index + 3], size, depth)


def _transformer_stage(
    table: ParameterTable, reader: ConfigReader, before: int, after: int, size: int, depth: int
) -> None:
    reader.divide(
        "hidden_sizes", size, "num_attention_heads", reader.integer("num_attention_heads")
    )
    name = f"transformer_{size}"
    kernel = reader.integer("conv_kernel_size")
    with table.block(f"{name}.convolutions"):
        _inverted(table, reader, before, after)
        convolution_norm(table, "conv_kxk", after, after, kernel)
        table.convolution("conv_1x1", after, size, 1, 1, bias=False)
        table.norm("layernorm", size)
        convolution_norm(table, "conv_projection", size, after, 1)
        convolution_norm(table, "fusion", 2 * after, after, kernel)
    with table.block(f"{name}.layers", count=depth):
        bias = reader.flag("qkv_bias", default=True)
        transformer_layer(table, size, int(size * ratio(reader, "mlp_ratio")), qkv_bias=bias)


def _inverted(table: ParameterTable, reader: ConfigReader, before: int, after: int) -> None:
    """``MobileViTInvertedResidual``: the expanded width is a multiple of eight."""
    wanted = round(before * ratio(reader, "expand_ratio"))
    inner = max(8, (wanted + 4) // 8 * 8)
    if inner < 0.9 * wanted:
        inner += 8
    convolution_norm(table, "expand_1x1", before, inner, 1)
    convolution_norm(table, "conv_3x3", inner, inner, 3, groups=inner)
    convolution_norm(table, "reduce_1x1", inner, after, 1)


def _segmentation_head(
    table: ParameterTable, reader: ConfigReader, request: ReadRequest, size: int
) -> None:
    """``MobileViTDeepLabV3``: five views of the image, one for each rate, one plain, one pooled."""
    width = reader.integer("aspp_out_channels")
    rates = reader.integers("atrous_rates", minimum=1)
    if len(rates) != 3:
        error = reader.fail("atrous_rates", f"expected 3 numbers, got {len(rates)}")
        raise error
    with table.block("head"):
        convolution_norm(table, "aspp.convs.0", size, width, 1)
        for index in range(len(rates)):
            convolution_norm(table, f"aspp.convs.{index + 1}", size, width, 3)
        convolution_norm(table, "aspp.convs.4", size, width, 1)
        convolution_norm(table, "aspp.project", 5 * width, width, 1)
        table.convolution("classifier", width, request.labels(reader), 1, 1)
