"""Image transformers in stages that narrow the image: Swin V2, CvT, LeViT, PVT, GLPN, FocalNet."""

from collections.abc import Callable
from itertools import pairwise

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import perceptron
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import (
    MAX_PARTS,
    at_least_one,
    each_stage,
    pair,
    ratio,
    stage_flags,
    stage_ratios,
)
from memplan.families.towers.swin import swin_size, swin_v2_tower
from memplan.families.towers.vit import num_patches
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

IMAGES = "ForImageClassification"
TEACHER = "ForImageClassificationWithTeacher"
MASKED_IMAGES = "ForMaskedImageModeling"
DEPTH = "ForDepthEstimation"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _swin_v2(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = swin_size(reader)

    def declare(table: ParameterTable, ending: str) -> None:
        swin_v2_tower(table, "model", reader, masked=ending == MASKED_IMAGES)
        with table.block("norm"):
            table.norm("layernorm", size)
        _image_head(table, reader, request, ending, size)

    return whole_model(
        reader, request, (IMAGES, BARE, MASKED_IMAGES), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip


def _image_head(
    table: ParameterTable, reader: ConfigReader, request: ReadRequest, ending: str, size: int
) -> None:
    """A classifier, or the convolution that draws masked patches again."""
    if ending == IMAGES:
        classifier(table, "classifier", size, request.labels(reader))
    if ending == MASKED_IMAGES:
        with table.block("head"):
            pixels = reader.integer("encoder_stride") ** 2 * reader.integer("num_channels")
            table.convolution("decoder", size, pixels, 1, 1)


def _focalnet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """FocalNet: each stage twice as wide as the one before, ``hidden_sizes`` are not read."""
    depths = at_least_one(reader, "depths")
    width = reader.integer("embed_dim")
    size = width * 2 ** (len(depths) - 1)

    def declare(table: ParameterTable, ending: str) -> None:
        convolved = reader.flag("use_conv_embed")
        with table.block("embed"):
            kernel = (7, 7) if convolved else pair(reader, "patch_size")
            table.convolution("patch_embeddings", reader.integer("num_channels"), width, *kernel)
            table.norm("embed_norm", width)
            if ending == MASKED_IMAGES:
                table.parameter("embeddings", "mask_token", 1, 1, width)
        for index, depth in enumerate(depths):
            with table.block(f"stages.{index}.layers", count=depth):
                _focal_layer(table, reader, width * 2**index, index, len(depths))
            if index + 1 < len(depths):
                with table.block(f"stages.{index}.downsample"):
                    before, across = width * 2**index, 3 if convolved else 2
                    table.convolution("downsample", before, 2 * before, across, across)
                    table.norm("downsample.norm", 2 * before)
        with table.block("norm"):
            table.norm("layernorm", size)
        _image_head(table, reader, request, ending, size)

    return whole_model(
        reader, request, (IMAGES, BARE, MASKED_IMAGES), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip


def _focal_layer(
    table: ParameterTable, reader: ConfigReader, size: int, index: int, num_stages: int
) -> None:
    """``FocalNetModulation``: each level's window is two wider than the one's before."""
    levels = each_stage(reader, "focal_levels", num_stages, minimum=0, maximum=MAX_PARTS)[index]
    window = each_stage(reader, "focal_windows", num_stages)[index]
    table.norm("norm1", size)
    table.norm("norm2", size)
    table.linear("modulation.projection_in", size, 2 * size + levels + 1)
    table.convolution("modulation.projection_context", size, size, 1, 1)
    table.linear("modulation.projection_out", size, size)
    for level in range(levels):
        kernel = window + 2 * level
        name = f"modulation.focal_layers.{level}"
        table.convolution(name, size, size, kernel, kernel, groups=size, bias=False)
    if reader.flag("use_post_layernorm_in_modulation"):
        table.norm("modulation.layernorm", size)
    perceptron(table, "mlp", size, int(size * ratio(reader, "mlp_ratio", default=4)))
    if reader.flag("use_layerscale"):
        table.parameter("layer", "gamma_1", size)
        table.parameter("layer", "gamma_2", size)


def _cvt(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CvT: queries, keys and values pass a depthwise convolution before they are projected."""
    depths = at_least_one(reader, "depth")
    sizes = each_stage(reader, "embed_dim", len(depths))

    def declare(table: ParameterTable, ending: str) -> None:
        before = reader.integer("num_channels")
        kernels = each_stage(reader, "patch_sizes", len(depths))
        tokens = stage_flags(reader, "cls_token", len(depths))
        for index, size in enumerate(sizes):
            with table.block(f"stages.{index}.embed"):
                if tokens[index]:
                    table.parameter("stage", "cls_token", 1, 1, sizes[-1])
                kernel = kernels[index]
                table.convolution("embedding", before, size, kernel, kernel)
                table.norm("embed_norm", size)
            with table.block(f"stages.{index}.layers", count=depths[index]):
                _cvt_layer(table, reader, index, len(depths))
            before = size
        if ending == IMAGES:
            with table.block("norm"):
                table.norm("layernorm", sizes[-1])
            classifier(table, "classifier", sizes[-1], request.labels(reader))

    return whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=sizes[-1], context_length=1
    )


def _cvt_layer(table: ParameterTable, reader: ConfigReader, index: int, num_stages: int) -> None:
    size = each_stage(reader, "embed_dim", num_stages)[index]
    kernel = each_stage(reader, "kernel_qkv", num_stages)[index]
    methods = reader.texts("qkv_projection_method")
    if len(methods) < num_stages:
        error = reader.fail("qkv_projection_method", f"must name {num_stages} methods")
        raise error
    if methods[index] == "dw_bn":
        for each in ("query", "key", "value"):
            name = f"attn.convolution_{each}"
            table.convolution(name, size, size, kernel, kernel, groups=size, bias=False)
            table.norm(f"{name}.norm", size)
    bias = stage_flags(reader, "qkv_bias", num_stages)[index]
    attention(table, "attn", size, bias=bias)
    table.norm("layernorm_before", size)
    table.norm("layernorm_after", size)
    perceptron(table, "mlp", size, int(size * stage_ratios(reader, "mlp_ratio", num_stages)[index]))


def _pvt(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """PVT: learned positions in every stage, a class token in the last."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)

    def declare(table: ParameterTable, ending: str) -> None:
        for index, size in enumerate(sizes):
            with table.block(f"stages.{index}.embed"):
                _pvt_embeddings(table, reader, sizes, index)
            with table.block(f"stages.{index}.layers", count=_depth(reader, index, count)):
                reductions = each_stage(reader, "sequence_reduction_ratios", count)
                bias = reader.flag("qkv_bias", default=True)
                inner = int(size * stage_ratios(reader, "mlp_ratios", count)[index])
                _reduced_attention(table, size, reductions[index], bias=bias)
                perceptron(table, "mlp", size, inner)
        with table.block("norm"):
            table.norm("layer_norm", sizes[-1])
        if ending == IMAGES:
            classifier(table, "classifier", sizes[-1], request.labels(reader))

    return whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=sizes[-1], context_length=1
    )


def _depth(reader: ConfigReader, index: int, num_stages: int) -> int:
    return each_stage(reader, "depths", num_stages)[index]


def _pvt_embeddings(
    table: ParameterTable, reader: ConfigReader, sizes: list[int], index: int
) -> None:
    """``PvtPatchEmbeddings``: the stride is the kernel's size, positions are counted in patches."""
    size, last = sizes[index], index + 1 == len(sizes)
    before = sizes[index - 1] if index else reader.integer("num_channels")
    kernel = each_stage(reader, "strides", len(sizes))[index]
    patch_size = each_stage(reader, "patch_sizes", len(sizes))[index]
    image_size = reader.integer("image_size") // (2 ** (index + 1) if index else 1)
    positions = (image_size // patch_size) ** 2 + last
    table.parameter("embeddings", "position_embeddings", 1, positions, size)
    if last:
        table.parameter("embeddings", "cls_token", 1, 1, size)
    table.convolution("projection", before, size, kernel, kernel)
    table.norm("embed_norm", size)


def _reduced_attention(
    table: ParameterTable, size: int, reduction: int, *, bias: bool = True
) -> None:
    """Attention whose keys and values come from a narrowed image, and the layer's two norms."""
    attention(table, "attn", size, bias=bias)
    if reduction > 1:
        table.convolution("attn.sequence_reduction", size, size, reduction, reduction)
        table.norm("attn.layer_norm", size)
    table.norm("layer_norm_1", size)
    table.norm("layer_norm_2", size)


def _glpn(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """GLPN: SegFormer's encoder, and a decoder that puts the depth of all stages together."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)

    def declare(table: ParameterTable, ending: str) -> None:
        mix_tower(table, "encoder", reader)
        if ending == DEPTH:
            _glpn_decoder(table, sizes, reader.integer("decoder_hidden_size"))

    return whole_model(
        reader, request, (DEPTH, BARE), declare, hidden_size=sizes[-1], context_length=1
    )


def mix_tower(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """The Mix Transformer: a depthwise convolution inside each feed-forward network."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)
    before = reader.integer("num_channels")
    for index, size in enumerate(sizes):
        with table.block(f"{name}.stages.{index}.embed"):
            kernel = each_stage(reader, "patch_sizes", count)[index]
            table.convolution("projection", before, size, kernel, kernel)
            table.norm("embed_norm", size)
        with table.block(f"{name}.stages.{index}.layers", count=_depth(reader, index, count)):
            _reduced_attention(table, size, each_stage(reader, "sr_ratios", count)[index])
            inner = int(size * stage_ratios(reader, "mlp_ratios", count)[index])
            if not inner:
                error = reader.fail("mlp_ratios", "leaves a feed-forward network no width")
                raise error
            perceptron(table, "mlp", size, inner)
            table.convolution("mlp.dwconv", inner, inner, 3, 3, groups=inner)
        with table.block(f"{name}.stages.{index}.norm"):
            table.norm("layer_norm", size)
        before = size


def _glpn_decoder(table: ParameterTable, sizes: list[int], width: int) -> None:
    """``GLPNDecoder``: the narrowest stage has nothing to be fused with."""
    for index, size in enumerate(reversed(sizes)):
        with table.block(f"decoder.stages.{index}"):
            if size != width:
                table.convolution("convolution", size, width, 1, 1)
            if index:
                half = width // 2
                table.convolution("fusion.convolution1", 2 * width, width, 3, 3)
                table.norm("fusion.norm1", width)
                table.convolution("fusion.convolution2", width, half, 3, 3)
                table.norm("fusion.norm2", half)
                table.convolution("fusion.convolution3", half, 2, 3, 3)
    with table.block("head"):
        table.convolution("head.0", width, width, 3, 3)
        table.convolution("head.2", width, 1, 3, 3)


def _levit(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """LeViT: every linear layer has a batch norm for its bias."""
    depths = at_least_one(reader, "depths")
    sizes = each_stage(reader, "hidden_sizes", len(depths))

    def declare(table: ParameterTable, ending: str) -> None:
        _levit_stem(table, reader, sizes[0])
        resolution = reader.integer("image_size") // reader.integer("patch_size")
        for index, depth in enumerate(depths):
            with table.block(f"stages.{index}.layers", count=depth):
                _levit_layer(table, reader, index, len(depths), resolution)
            if index + 1 < len(depths):
                with table.block(f"stages.{index}.downsample"):
                    resolution = _levit_downsample(table, reader, sizes, index, resolution)
        names = {IMAGES: ("classifier",), TEACHER: ("classifier", "classifier_distill")}
        for name in names.get(ending, ()):
            with table.block("head"):
                table.norm(f"{name}.batch_norm", sizes[-1])
                table.linear(f"{name}.linear", sizes[-1], request.labels(reader))

    return whole_model(
        reader, request, (IMAGES, BARE, TEACHER), declare,
        hidden_size=sizes[-1], context_length=1,
    )  # fmt: skip


def _levit_stem(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """Four convolutions, each with twice the channels of the one before."""
    kernel = reader.integer("kernel_size")
    channels = [reader.integer("num_channels"), *(size // 2**step for step in (3, 2, 1, 0))]
    with table.block("embed"):
        for index, (before, after) in enumerate(pairwise(channels)):
            name = f"embedding_layer_{index + 1}"
            table.convolution(name, before, after, kernel, kernel, bias=False)
            table.norm(f"{name}.batch_norm", after)


def _normed_linear(table: ParameterTable, name: str, size: int, out: int) -> None:
    table.linear(f"{name}.linear", size, out, bias=False)
    table.norm(f"{name}.batch_norm", out)


def _levit_layer(
    table: ParameterTable, reader: ConfigReader, index: int, num_stages: int, resolution: int
) -> None:
    size = each_stage(reader, "hidden_sizes", num_stages)[index]
    key = each_stage(reader, "key_dim", num_stages)[index]
    heads = each_stage(reader, "num_attention_heads", num_stages)[index]
    values = each_stage(reader, "attention_ratio", num_stages)[index] * key * heads
    _normed_linear(table, "attn.queries_keys_values", size, values + 2 * key * heads)
    _normed_linear(table, "attn.projection", values, size)
    table.parameter("attn", "attention_biases", heads, resolution**2)
    _levit_perceptron(table, size, each_stage(reader, "mlp_ratio", num_stages, minimum=0)[index])


def _levit_perceptron(table: ParameterTable, size: int, times: int) -> None:
    if times:
        _normed_linear(table, "mlp.linear_up", size, size * times)
        _normed_linear(table, "mlp.linear_down", size * times, size)


def _levit_downsample(
    table: ParameterTable, reader: ConfigReader, sizes: list[int], index: int, resolution: int
) -> int:
    """``LevitAttentionSubsample`` as ``down_ops`` say; gives the resolution behind it.

    Where the config has none, ``LevitConfig`` makes heads of the stage's key width, four times as
    wide values, a network twice as wide and a stride of two.
    """
    before, after = sizes[index], sizes[index + 1]
    key, heads, times, wider, stride = _down_operation(reader, sizes, index)
    values = times * key * heads
    _normed_linear(table, "attn.keys_values", before, values + key * heads)
    _normed_linear(table, "attn.queries", before, key * heads)
    _normed_linear(table, "attn.projection", values, after)
    table.parameter("attn", "attention_biases", heads, resolution**2)
    _levit_perceptron(table, after, wider)
    return (resolution - 1) // stride + 1


def _down_operation(reader: ConfigReader, sizes: list[int], index: int) -> list[int]:
    given = reader.sequence("down_ops")
    if not given:
        key = each_stage(reader, "key_dim", len(sizes))[0]
        return [key, sizes[index] // key, 4, 2, 2]
    row = given[index] if index < len(given) else None
    if not isinstance(row, list) or len(row) != 6 or row[0] != "Subsample":
        error = reader.fail("down_ops", f"row {index} must be 'Subsample' and five whole numbers")
        raise error
    numbers = [each for each in row[1:] if isinstance(each, int) and each >= 0]
    if len(numbers) != 5 or not (numbers[0] and numbers[1] and numbers[4]):
        error = reader.fail("down_ops", f"row {index} must be 'Subsample' and five whole numbers")
        raise error
    return numbers


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "swinv2": _swin_v2,
    "focalnet": _focalnet,
    "cvt": _cvt,
    "pvt": _pvt,
    "glpn": _glpn,
    "levit": _levit,
}
