"""MobileViT: inverted residuals, and small transformers between convolutions."""

from memplan.families.classes import BARE, classifier, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.networks.pyramid_parts import network, normed
from memplan.families.towers.parts import convolution_norm, transformer_layer
from memplan.families.towers.sizes import each_stage, ratio
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import CallBody, ChainBody, ResidualBody, TowerBody, WaysBody
from memplan.model.towers.gridded.grids import FoldedBody, ReducedAttentionBody, UnfoldedBody
from memplan.model.towers.gridded.levels import SegmentedBody
from memplan.model.towers.gridded.nets import (
    BatchNormBody,
    ChannelDropBody,
    ConvolutionBody,
    DropoutBody,
    PixelsBody,
    Window,
    WindowBody,
)
from memplan.model.towers.parts import ActivationBody, NormBody

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
        active = _active(reader)
        mean = WindowBody(window=Window.MEAN, keeps_input=False)
        with table.block("norm"):
            parts = _convolved(table, "conv_1x1_exp", neck[5], neck[6], 1, active=active)
            table.computes(ChainBody(parts=(*parts, mean)))
        if ending == IMAGES:
            drop = DropoutBody(probability=reader.number("classifier_dropout_prob", default=0.1))
            with table.block("dropout", body=drop):
                pass
            classifier(table, "classifier", neck[6], request.labels(reader), known=True)

    return whole_model(
        reader, request, (IMAGES, BARE, SEGMENTATION), declare,
        hidden_size=neck[6], context_length=1,
    )  # fmt: skip


def _active(reader: ConfigReader) -> Activation:
    return tower_activation(reader, "hidden_act", default="silu")


def _convolved(
    table: ParameterTable,
    name: str,
    before: int,
    after: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    active: Activation | None = None,
) -> tuple[TowerBody, ...]:
    """``MobileViTConvLayer``: declares its weights; what it computes."""
    convolution_norm(table, name, before, after, kernel, groups=groups)
    parts: tuple[TowerBody, ...] = (
        ConvolutionBody(
            module=f"{name}.convolution", kernel=dilation * (kernel - 1) + 1, stride=stride,
            padding=(kernel - 1) // 2 * dilation * 2,
        ),
        BatchNormBody(module=f"{name}.normalization", channels=after),
    )  # fmt: skip
    return parts if active is None else (*parts, ActivationBody(activation=active))


def _encoder(table: ParameterTable, reader: ConfigReader, neck: list[int]) -> None:
    channels, side = reader.integer("num_channels"), reader.integer("image_size")
    pixels = PixelsBody(channels=channels, image=(side, side))
    with table.block("embed"):
        stem = _convolved(
            table, "conv_stem", channels, neck[0], 3, stride=2, active=_active(reader)
        )
        table.computes(ChainBody(parts=(pixels, *stem)))
    for name, step, count in (
        ("stages.0", _Step(neck[0], neck[1]), 1),
        ("stages.1.first", _Step(neck[1], neck[2], stride=2), 1),
        ("stages.1.rest", _Step(neck[2], neck[2]), PLAIN_LAYERS - 1),
    ):
        with table.block(name, count=count):
            table.computes(_inverted(table, "", reader, step))
    sizes = each_stage(reader, "hidden_sizes", len(TRANSFORMER_DEPTHS))
    # An output stride of 16 keeps the positions of the last stage, one of 8 those of the last two.
    kept, dilation = {8: 2, 16: 1}.get(reader.integer("output_stride", default=32), 0), 1
    for index, (size, depth) in enumerate(zip(sizes, TRANSFORMER_DEPTHS, strict=True)):
        if index and kept >= len(sizes) - index:
            dilation *= 2
        step = _Step(
            neck[index + 2], neck[index + 3], stride=1 if dilation > 1 else 2,
            dilation=max(1, dilation // 2),
        )  # fmt: skip
        with table.block(f"stages.{index + 2}.layers"):
            table.computes(_transformer_stage(table, reader, step, size, depth))


@dataclass(frozen=True, slots=True)
class _Step:
    before: int
    after: int
    stride: int = 1
    dilation: int = 1


def _transformer_stage(
    table: ParameterTable, reader: ConfigReader, step: _Step, size: int, depth: int
) -> TowerBody:
    """``MobileViTLayer``, which checkpointing takes as a whole."""
    heads = reader.integer("num_attention_heads")
    reader.divide("hidden_sizes", size, "num_attention_heads", heads)
    kernel, after, active = reader.integer("conv_kernel_size"), step.after, _active(reader)
    bias, inner = reader.flag("qkv_bias", default=True), int(size * ratio(reader, "mlp_ratio"))
    drop = reader.number("hidden_dropout_prob", default=0.1)
    side = reader.integer("patch_size")
    smaller = _inverted(table, "downsampling_layer.", reader, step)
    local = _convolved(table, "conv_kxk", after, after, kernel, active=active)
    table.convolution("conv_1x1", after, size, 1, 1, bias=False)
    layers: list[TowerBody] = []
    for number in range(depth):
        name = f"layers.{number}."
        transformer_layer(table, size, inner, qkv_bias=bias, prefix=name)
        mixed = ReducedAttentionBody(
            module=f"{name}self_attn", size=size, num_heads=heads, reduction=1, bias=bias,
            dropout=reader.number("attention_probs_dropout_prob", default=0.0), output_dropout=drop,
        )  # fmt: skip
        fed = network(f"{name}mlp", size, inner, active, dropout=drop, inner_dropout=False)
        halves = (
            normed(f"{name}layer_norm1", size, mixed, names_branch=True),
            normed(f"{name}layer_norm2", size, fed),
        )
        layers.append(CallBody(parts=halves))
    table.norm("layernorm", size)
    past: tuple[TowerBody, ...] = (
        *local,
        ConvolutionBody(module="conv_1x1", kernel=1),
        UnfoldedBody(size=size, side=side),
        *layers,
        NormBody(module="layernorm", size=size),
        FoldedBody(size=size, side=side),
        *_convolved(table, "conv_projection", size, after, 1, active=active),
    )
    last = _convolved(table, "fusion", 2 * after, after, kernel, active=active)
    return ChainBody(parts=(smaller, WaysBody(ways=((), past)), *last))


def _inverted(table: ParameterTable, prefix: str, reader: ConfigReader, step: _Step) -> TowerBody:
    """``MobileViTInvertedResidual``: the expanded width is a multiple of eight."""
    before, after, active = step.before, step.after, _active(reader)
    wanted = round(before * ratio(reader, "expand_ratio"))
    inner = max(8, (wanted + 4) // 8 * 8)
    if inner < 0.9 * wanted:
        inner += 8
    parts = (
        *_convolved(table, f"{prefix}expand_1x1", before, inner, 1, active=active),
        *_convolved(
            table, f"{prefix}conv_3x3", inner, inner, 3, stride=step.stride, groups=inner,
            dilation=step.dilation, active=active,
        ),
        *_convolved(table, f"{prefix}reduce_1x1", inner, after, 1),
    )  # fmt: skip
    if step.stride == 1 and before == after:
        return ResidualBody(branch=parts)
    return ChainBody(parts=parts)


def _segmentation_head(
    table: ParameterTable, reader: ConfigReader, request: ReadRequest, size: int
) -> None:
    """``MobileViTDeepLabV3``: five views of the image, one for each rate, one plain, one pooled."""
    width = reader.integer("aspp_out_channels")
    rates = reader.integers("atrous_rates", minimum=1)
    if len(rates) != 3:
        error = reader.fail("atrous_rates", f"expected 3 numbers, got {len(rates)}")
        raise error
    labels, relu = request.labels(reader), Activation.RELU
    with table.block("head"):
        ways = [_convolved(table, "aspp.convs.0", size, width, 1, active=relu)]
        for index, rate in enumerate(rates):
            name = f"aspp.convs.{index + 1}"
            ways.append(_convolved(table, name, size, width, 3, dilation=rate, active=relu))
        mean = WindowBody(window=Window.MEAN, keeps_input=False)
        ways.append((mean, *_convolved(table, "aspp.convs.4", size, width, 1, active=relu)))
        project = _convolved(table, "aspp.project", 5 * width, width, 1, active=relu)
        table.convolution("classifier", width, labels, 1, 1)
        parts: tuple[TowerBody, ...] = (
            WaysBody(ways=tuple(ways)),
            *project,
            DropoutBody(probability=reader.number("aspp_dropout_prob", default=0.1)),
            ChannelDropBody(
                channels=width, probability=reader.number("classifier_dropout_prob", default=0.1)
            ),
            ConvolutionBody(module="classifier", kernel=1, bias=True),
            SegmentedBody(num_classes=labels),
        )
        table.computes(ChainBody(parts=parts))
