"""Detectors of objects: LW-DETR and RF-DETR, D-FINE."""

from collections.abc import Callable, Mapping

from memplan.families.classes import BARE, dispatch, whole_model
from memplan.families.nesting import Part, PartSpec, read_part, unknown_part
from memplan.families.request import ReadRequest
from memplan.families.towers.layers import perceptron
from memplan.families.towers.networks.hgnet import hgnet_sizes, hgnet_tower
from memplan.families.towers.parts import attention, multi_layer
from memplan.families.towers.sizes import at_least_one, each_stage, few, pair, ratio
from memplan.families.towers.vit import num_patches, patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

DETECTION = "ForObjectDetection"
SEGMENTATION = "ForInstanceSegmentation"
BOX = 4
"""Numbers that say where an object is."""
SPLIT_ABOVE = 512
"""Channels above which upsampling narrows in two steps (``LwDetrSamplingLayer``)."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _backbone(reader: ConfigReader, model_type: str) -> Part:
    part = read_part(reader, PartSpec(key="backbone_config", model_type=model_type))
    if part.model_type != model_type:
        raise unknown_part(part, {model_type: None})
    return part


def _light_detr(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """LW-DETR and RF-DETR: groups of queries that only training has more than one of."""
    grouped = request.model_type == "lw_detr"
    part = _backbone(reader, "lw_detr_vit" if grouped else "rf_detr_dinov2")
    size = reader.integer("d_model")
    labels = request.labels(reader)

    def declare(table: ParameterTable, ending: str) -> None:
        if grouped:
            _windowed_vit(table, part.reader)
            _multi_scale_projector(table, reader, part.reader)
        else:
            _dinov2(table, part.reader)
            with table.block("projector"):
                width = part.reader.integer("hidden_size")
                _cross_stage(table, reader, width * _num_features(part.reader))
                table.norm("layer_norm", size)
        _query_decoder(table, reader, labels, levels=_levels(reader))
        if ending != BARE:
            with table.block("head"):
                table.linear("class_embed", size, labels)
                multi_layer(table, "bbox_embed", size, size, BOX, 3)
        if ending == SEGMENTATION:
            _mask_head(table, reader, size)

    endings = (DETECTION, BARE) if grouped else (DETECTION, BARE, SEGMENTATION)
    return whole_model(
        reader, request, endings, declare,
        hidden_size=size, context_length=reader.integer("num_queries"),
    )  # fmt: skip


def _dinov2(table: ParameterTable, reader: ConfigReader) -> None:
    """DINOv2 with windows (``RfDetrDinov2Backbone``)."""
    size = reader.integer("hidden_size")
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    with table.block("backbone.embed"):
        table.parameter("embeddings", "cls_token", 1, 1, size)
        table.parameter("embeddings", "position_embeddings", 1, num_patches(reader) + 1, size)
        if reader.flag("use_mask_token", default=True):
            table.parameter("embeddings", "mask_token", 1, size)
        patch_projection(table, reader, size)
    with table.block("backbone.layers", count=reader.layers("num_hidden_layers")):
        attention(table, "self_attn", size, bias=reader.flag("qkv_bias", default=True))
        for name in ("norm1", "norm2"):
            table.norm(name, size)
        for name in ("layer_scale1", "layer_scale2"):
            table.parameter(name, "lambda1", size)
        if reader.flag("use_swiglu_ffn"):
            narrow = (inner * 2 // 3 + 7) // 8 * 8
            for name in ("gate_proj", "up_proj"):
                table.linear(f"mlp.{name}", size, narrow)
            table.linear("mlp.down_proj", narrow, size)
        else:
            perceptron(table, "mlp", size, inner)
    with table.block("backbone.norm"):
        table.norm("layernorm", size)


def _levels(reader: ConfigReader) -> int:
    """Feature maps that the decoder looks at: one for each scale of the projector."""
    scales = len(reader.sequence("projector_scale_factors"))
    return reader.integer("num_feature_levels", default=scales or 1)


def _num_features(backbone: ConfigReader) -> int:
    """Stages of the backbone that are looked at; the last one where none is named."""
    return len(backbone.sequence("out_indices") or backbone.sequence("out_features")) or 1


def _windowed_vit(table: ParameterTable, reader: ConfigReader) -> None:
    """``LwDetrViTBackbone``: keys without a bias, outputs scaled, no last norm."""
    size = reader.integer("hidden_size")
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    with table.block("backbone.embed"):
        patch_projection(table, reader, size)
        if reader.flag("use_absolute_position_embeddings", default=True):
            height, width = pair(reader, "pretrain_image_size")
            down, across = pair(reader, "patch_size")
            positions = (height // down) * (width // across) + 1
            table.parameter("embeddings", "position_embeddings", 1, positions, size)
    with table.block("backbone.layers", count=reader.layers("num_hidden_layers")):
        bias = reader.flag("qkv_bias", default=True)
        attention(table, "self_attn", size, bias=bias, key_bias=False)
        perceptron(table, "mlp", size, inner)
        table.norm("layernorm_before", size)
        table.norm("layernorm_after", size)
        table.parameter("layer", "gamma_1", size)
        table.parameter("layer", "gamma_2", size)


def _multi_scale_projector(
    table: ParameterTable, reader: ConfigReader, backbone: ConfigReader
) -> None:
    """``LwDetrMultiScaleProjector``: the stages, resampled and put together for each scale."""
    size, count = backbone.integer("hidden_size"), _num_features(backbone)
    scales = reader.sequence("projector_scale_factors")
    for index, scale in enumerate(scales):
        given = size
        with table.block(f"projector.{index}.sampling", count=count):
            if scale == 2:
                given = _upsampled(table, size)
            elif scale == 0.5:
                _conv_norm(table, "sampling.conv", size, size, 3)
        with table.block(f"projector.{index}"):
            _cross_stage(table, reader, given * count)
            table.norm("layer_norm", reader.integer("d_model"))


def _upsampled(table: ParameterTable, size: int) -> int:
    """A transposed convolution to twice the size; gives the channels behind it."""
    half = size // 2
    if size <= SPLIT_ABOVE:
        table.convolution("sampling.upsample", half, size, 2, 2, bias=False)
        table.parameter("sampling.upsample", "bias", half)
        return half
    _conv_norm(table, "sampling.conv", size, half, 1)
    table.convolution("sampling.upsample", half // 2, half, 2, 2, bias=False)
    table.parameter("sampling.upsample", "bias", half // 2)
    return size // 4


def _conv_norm(
    table: ParameterTable, name: str, before: int, after: int, kernel: int, *, groups: int = 1
) -> None:
    table.convolution(f"{name}.conv", before, after, kernel, kernel, groups=groups, bias=False)
    table.norm(f"{name}.norm", after)


def _cross_stage(table: ParameterTable, reader: ConfigReader, before: int) -> None:
    """``C2FLayer``: half of the channels pass blocks, each of whose results is kept."""
    out, blocks = reader.integer("d_model"), few(reader, "c2f_num_blocks")
    hidden = int(out * ratio(reader, "hidden_expansion"))
    _conv_norm(table, "projector.conv1", before, 2 * hidden, 1)
    _conv_norm(table, "projector.conv2", (2 + blocks) * hidden, out, 1)
    for index in range(blocks):
        _conv_norm(table, f"projector.bottlenecks.{index}.conv1", hidden, hidden, 3)
        _conv_norm(table, f"projector.bottlenecks.{index}.conv2", hidden, hidden, 3)


def _query_decoder(
    table: ParameterTable, reader: ConfigReader, num_labels: int, *, levels: int
) -> None:
    """Queries, the decoder, and for each group what picks the first boxes."""
    size, groups = reader.integer("d_model"), reader.integer("group_detr")
    queries = reader.integer("num_queries") * groups
    with table.block("queries.embed"):
        table.embedding("reference_point_embed", queries, BOX)
        table.embedding("query_feat", queries, size)
    heads = reader.integer("decoder_self_attention_heads")
    head_dim = reader.integer("head_dim", default=size // heads)
    bias = reader.flag("attention_bias", default=True)
    with table.block("decoder.layers", count=reader.layers("decoder_layers")):
        inner = heads * head_dim
        attention(table, "self_attn", size, bias=bias, output_bias=bias, inner=inner)
        points = reader.integer("decoder_cross_attention_heads") * levels
        points *= reader.integer("decoder_n_points")
        _deformable(table, "cross_attn", size, points)
        table.linear("cross_attn.value_proj", size, size)
        table.linear("cross_attn.output_proj", size, size)
        perceptron(table, "mlp", size, reader.integer("decoder_ffn_dim"))
        for norm in ("self_attn_layer_norm", "cross_attn_layer_norm", "layer_norm"):
            table.norm(norm, size)
    with table.block("decoder.norm"):
        table.norm("layernorm", size)
        multi_layer(table, "ref_point_head", 2 * size, size, size, 2)
    with table.block("proposals", count=groups):
        table.linear("enc_output", size, size)
        table.norm("enc_output_norm", size)
        multi_layer(table, "enc_out_bbox_embed", size, size, BOX, 3)
        table.linear("enc_out_class_embed", size, num_labels)


def _deformable(table: ParameterTable, name: str, size: int, points: int) -> None:
    """Where in the image to look, and how much each place counts."""
    table.linear(f"{name}.sampling_offsets", size, 2 * points)
    table.linear(f"{name}.attention_weights", size, points)


def _mask_head(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """``RfDetrForInstanceSegmentation``: a block for each decoder layer, and the queries' network."""
    with table.block("head.blocks", count=reader.layers("decoder_layers")):
        table.norm("layernorm", size)
        table.convolution("depthwise_conv", size, size, 3, 3, groups=size)
        table.linear("pointwise_conv", size, size)
    with table.block("head.masks"):
        table.convolution("spatial_features_proj", size, size, 1, 1)
        table.norm("query_features_block.norm", size)
        inner = reader.integer("intermediate_size")
        perceptron(table, "query_features_block.mlp", size, inner)
        table.linear("query_features_proj", size, size)
        table.parameter("model", "segmentation_bias", 1)


def _d_fine(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """D-FINE: boxes as distributions that every decoder layer makes finer."""
    part = _backbone(reader, "hgnet_v2")
    size = reader.integer("d_model")
    labels = request.labels(reader)

    def declare(table: ParameterTable, ending: str) -> None:
        frozen = reader.flag("freeze_backbone_batch_norms", default=True)
        hgnet_tower(table, "backbone", part.reader, trained_norms=not frozen)
        _hybrid_encoder(table, reader, part.reader)
        _proposals(table, reader, size, labels)
        _fine_decoder(table, reader, size)
        if ending == DETECTION:
            _fine_heads(table, reader, size, labels)

    return whole_model(
        reader, request, (DETECTION, BARE), declare,
        hidden_size=size, context_length=reader.integer("num_queries"),
    )  # fmt: skip


def _hybrid_encoder(table: ParameterTable, reader: ConfigReader, backbone: ConfigReader) -> None:
    """Attention on the smallest features only, then paths up and down between the stages."""
    size, inner = reader.integer("encoder_hidden_dim"), reader.integer("encoder_ffn_dim")
    used = len(at_least_one(reader, "decoder_in_channels"))
    with table.block("encoder.embed"):
        for index, before in enumerate(_feature_channels(backbone)[:used]):
            _conv_norm(table, f"encoder_input_proj.{index}", before, size, 1)
    attended = len(reader.integers("encode_proj_layers"))
    with table.block("encoder.layers", count=attended * reader.layers("encoder_layers")):
        attention(table, "self_attn", size)
        table.norm("self_attn_layer_norm", size)
        multi_layer(table, "mlp", size, inner, size, 2)
        table.norm("final_layer_norm", size)
    paths = len(at_least_one(reader, "encoder_in_channels")) - 1
    with table.block("encoder.paths", count=paths):
        _conv_norm(table, "lateral", size, size, 1)
        _conv_norm(table, "downsample.conv1", size, size, 1)
        _conv_norm(table, "downsample.conv2", size, size, 3, groups=size)
    narrow = round(ratio(reader, "hidden_expansion") * size // 2)
    with table.block("encoder.blocks", count=2 * paths):
        _elan(table, size, narrow)
    bottlenecks = round(3 * ratio(reader, "depth_mult", default=1))
    with table.block("encoder.bottlenecks", count=2 * paths * 2 * bottlenecks):
        _conv_norm(table, "bottleneck.conv1", narrow, narrow, 3)
        _conv_norm(table, "bottleneck.conv2", narrow, narrow, 1)


def _feature_channels(backbone: ConfigReader) -> list[int]:
    """Channels of the stages that ``out_features`` name; of the last one where there is none."""
    sizes = hgnet_sizes(backbone)
    known: Mapping[str, int] = {f"stage{index + 1}": each for index, each in enumerate(sizes)}
    named = backbone.texts("out_features")
    for each in named:
        backbone.choice("out_features", each, known)
    return [known[each] for each in named] or sizes[-1:]


def _elan(table: ParameterTable, size: int, narrow: int) -> None:
    """``DFineRepNCSPELAN4`` without the bottlenecks of its two chains."""
    _conv_norm(table, "conv1", 2 * size, 2 * size, 1)
    for chain, before in (("csp_rep1", size), ("csp_rep2", narrow)):
        _conv_norm(table, f"{chain}.conv1", before, narrow, 1)
        _conv_norm(table, f"{chain}.conv2", before, narrow, 1)
    _conv_norm(table, "conv2", narrow, narrow, 3)
    _conv_norm(table, "conv3", narrow, narrow, 3)
    _conv_norm(table, "conv4", 2 * size + 2 * narrow, size, 1)


def _proposals(table: ParameterTable, reader: ConfigReader, size: int, num_labels: int) -> None:
    """What picks the first boxes, and embeddings of labels that training disturbs."""
    with table.block("proposals"):
        if reader.integer("num_denoising", minimum=0):
            table.embedding("denoising_class_embed", num_labels + 1, size)
        if reader.flag("learn_initial_query"):
            table.embedding("weight_embedding", reader.integer("num_queries"), size)
        table.linear("enc_output.0", size, size)
        table.norm("enc_output.1", size)
        table.linear("enc_score_head", size, num_labels)
        multi_layer(table, "enc_bbox_head", size, size, BOX, 3)
        _decoder_inputs(table, reader, size)


def _decoder_inputs(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    """A convolution for each level, where the encoder's width is not the decoder's."""
    channels = at_least_one(reader, "decoder_in_channels")
    if channels[-1] == size:
        return
    levels = few(reader, "num_feature_levels")
    for index in range(max(levels, len(channels))):
        kernel = 1 if index < len(channels) else 3
        _conv_norm(table, f"decoder_input_proj.{index}", channels[-1], size, kernel)


def _last_layer(reader: ConfigReader) -> int:
    """The layer whose boxes are taken; later ones only teach."""
    count = reader.layers("decoder_layers")
    index = reader.integer("eval_idx", default=-1, minimum=-count, maximum=count - 1)
    return index if index >= 0 else count + index


def _fine_decoder(table: ParameterTable, reader: ConfigReader, size: int) -> None:
    count, last = reader.layers("decoder_layers"), _last_layer(reader)
    heads, levels = reader.integer("decoder_attention_heads"), few(reader, "num_feature_levels")
    if isinstance(reader.raw("decoder_n_points"), list):
        points = heads * sum(each_stage(reader, "decoder_n_points", levels))
    else:
        points = heads * levels * reader.integer("decoder_n_points")
    with table.block("decoder.layers", count=2 * count - last - 1):
        attention(table, "self_attn", size)
        table.norm("self_attn_layer_norm", size)
        _deformable(table, "encoder_attn", size, points)
        multi_layer(table, "mlp", size, reader.integer("decoder_ffn_dim"), size, 2)
        table.norm("final_layer_norm", size)
        table.linear("gateway.gate", 2 * size, 2 * size)
        table.norm("gateway.norm", size)
    with table.block("decoder.embed"):
        table.parameter("decoder", "reg_scale", 1)
        table.parameter("decoder", "up", 1)
        multi_layer(table, "query_pos_head", BOX, 2 * size, size, 2)
        multi_layer(table, "pre_bbox_head", size, size, BOX, 3)
    with table.block("decoder.quality", count=count):
        seen = BOX * (reader.integer("top_prob_values") + 1)
        depth = max(1, few(reader, "lqe_layers"))
        multi_layer(table, "lqe_layers", seen, reader.integer("lqe_hidden_dim"), 1, depth)


def _fine_heads(table: ParameterTable, reader: ConfigReader, size: int, num_labels: int) -> None:
    """Classes and distributions for each layer; the decoder's own are these."""
    count, last = reader.layers("decoder_layers"), _last_layer(reader)
    bins = BOX * (reader.integer("max_num_bins") + 1)
    scaled = round(ratio(reader, "layer_scale", default=1) * size)
    with table.block("head.classes", count=count):
        table.linear("class_embed", size, num_labels)
    with table.block("head.boxes", count=last + 1):
        multi_layer(table, "bbox_embed", size, size, bins, 3)
    with table.block("head.later_boxes", count=count - last - 1):
        multi_layer(table, "bbox_embed", scaled, scaled, bins, 3)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "lw_detr": _light_detr,
    "rf_detr": _light_detr,
    "d_fine": _d_fine,
}
