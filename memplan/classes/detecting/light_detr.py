"""LW-DETR and RF-DETR: groups of queries that only training has more than one of.

(transformers 5.23: models/lw_detr, models/rf_detr)
"""

from typing import ClassVar

from memplan.classes.detecting.parts import (
    BOX,
    DETECTION,
    Detector,
    DetectorStates,
    DetectorTask,
    attention,
    backbone_config,
    conv_norm,
    deformable,
    listed,
    multi_layer,
    perceptron,
)
from memplan.classes.pictures.base import PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.families.towers.sizes import few, pair, ratio
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader

SPLIT_ABOVE = 512
"""Channels above which upsampling narrows in two steps (``LwDetrSamplingLayer``)."""


def num_features(backbone: ConfigReader) -> int:
    """Stages of the backbone that are looked at; the last one where none is named."""
    return len(backbone.sequence("out_indices") or backbone.sequence("out_features")) or 1


def patches(part: ConfigReader, size: int) -> Conv2d:
    """The convolution that makes a vector of each patch."""
    return Conv2d(part.integer("num_channels"), size, *pair(part, "patch_size"), bias=True)


def positions(part: ConfigReader, key: str) -> int:
    """Patches of a picture, and one more."""
    (height, width), (down, across) = pair(part, key), pair(part, "patch_size")
    count = (height // down) * (width // across)
    if not count:
        error = part.fail(key, "is smaller than patch_size")
        raise error
    return count + 1


def dinov2(part: ConfigReader) -> Parts:
    """DINOv2 with windows (``RfDetrDinov2Backbone``)."""
    size = part.integer("hidden_size")
    inner = int(size * ratio(part, "mlp_ratio", default=4))
    embeddings = Parts(cls_token=Weight(1, 1, size))
    if part.flag("use_mask_token"):
        embeddings.mask_token = Weight(1, size)
    embeddings.position_embeddings = Weight(1, positions(part, "image_size"), size)
    embeddings.patch_embeddings = Parts(projection=patches(part, size))

    def layer(_: object) -> Module:
        if part.flag("use_swiglu_ffn"):
            narrow = (inner * 2 // 3 + 7) // 8 * 8
            mlp = Parts(
                weights_in=Linear(size, 2 * narrow, bias=True),
                weights_out=Linear(narrow, size, bias=True),
            )
        else:
            mlp = perceptron(size, inner)
        return Parts(
            norm1=LayerNorm(size),
            attention=attention(size, bias=part.flag("qkv_bias")),
            layer_scale1=Parts(lambda1=Weight(size)), norm2=LayerNorm(size), mlp=mlp,
            layer_scale2=Parts(lambda1=Weight(size)),
        )  # fmt: skip

    layers = LayerList("backbone.layers", [None] * part.layers("num_hidden_layers"), layer)
    return Parts(embeddings=embeddings, encoder=Parts(layer=layers), layernorm=LayerNorm(size))


def windowed_vit(part: ConfigReader) -> Parts:
    """``LwDetrViTBackbone``: keys without a bias, outputs scaled, no last norm."""
    size = part.integer("hidden_size")
    inner = int(size * ratio(part, "mlp_ratio", default=4))
    embeddings = Parts()
    if part.flag("use_absolute_position_embeddings"):
        rows = positions(part, "pretrain_image_size")
        embeddings.position_embeddings = Weight(1, rows, size)
    embeddings.projection = patches(part, size)

    def layer(_: object) -> Module:
        bias = part.flag("qkv_bias")
        return Parts(
            gamma_1=Weight(size), gamma_2=Weight(size),
            attention=attention(size, bias=bias, key_bias=False),
            intermediate=perceptron(size, inner), layernorm_before=LayerNorm(size),
            layernorm_after=LayerNorm(size),
        )  # fmt: skip

    layers = LayerList("backbone.layers", [None] * part.layers("num_hidden_layers"), layer)
    return Parts(embeddings=embeddings, encoder=Parts(layer=layers))


def cross_stage(config: ConfigReader, before: int) -> Parts:
    """``C2FLayer``: half of the channels pass blocks, each of whose results is kept."""
    out, blocks = config.integer("d_model"), few(config, "c2f_num_blocks")
    hidden = int(out * ratio(config, "hidden_expansion"))
    bottlenecks = (
        Parts(conv1=conv_norm(hidden, hidden, 3), conv2=conv_norm(hidden, hidden, 3))
        for _ in range(blocks)
    )
    return Parts(
        conv1=conv_norm(before, 2 * hidden, 1), conv2=conv_norm((2 + blocks) * hidden, out, 1),
        bottlenecks=listed(bottlenecks),
    )  # fmt: skip


def multi_scale_projector(config: ConfigReader, part: ConfigReader) -> Parts:
    """``LwDetrMultiScaleProjector``: the stages, resampled and put together for each scale."""
    size, count, scales = part.integer("hidden_size"), num_features(part), []
    for scale in config.sequence("projector_scale_factors"):
        sampling = [sampled(size, scale) for _ in range(count)]
        given = sampling[0][1]
        scales.append(Parts(
            sampling_layers=listed(layers for layers, _ in sampling),
            projector_layer=cross_stage(config, given * count),
            layer_norm=LayerNorm(config.integer("d_model")),
        ))  # fmt: skip
    return Parts(scale_layers=listed(scales))


def sampled(size: int, scale: object) -> tuple[Parts, int]:
    """What brings a stage to another size, and the channels behind it."""
    half = size // 2
    if scale == 0.5:
        return Parts(layers=listed([conv_norm(size, size, 3)])), size
    if scale != 2:
        return Parts(), size
    if size <= SPLIT_ABOVE:
        return Parts(layers=listed([upsample(size, half)])), half
    layers = [conv_norm(size, half, 1), upsample(half, half // 2)]
    return Parts(layers=listed(layers)), size // 4


def upsample(before: int, after: int) -> Parts:
    """``torch.nn.ConvTranspose2d``."""
    return Parts(weight=Weight(before, after, 2, 2), bias=Weight(after))


def decoder_layer(config: ConfigReader, size: int) -> Parts:
    """Attention to one another, then to places of the picture, and a network."""
    heads = config.integer("decoder_self_attention_heads")
    head_dim = config.integer("head_dim", default=size // heads)
    bias = config.flag("attention_bias")
    own = attention(size, width=heads * head_dim, bias=bias)
    if not bias:
        own.children["o_proj"].weights.pop("bias")
    # Feature maps that the decoder looks at: one for each scale of the projector.
    scales = len(config.sequence("projector_scale_factors"))
    levels = config.integer("num_feature_levels", default=scales or 1)
    points = config.integer("decoder_cross_attention_heads") * levels
    crossing = Parts(
        **deformable(size, points * config.integer("decoder_n_points")),
        value_proj=Linear(size, size, bias=True), output_proj=Linear(size, size, bias=True),
    )  # fmt: skip
    return Parts(
        self_attn=own, self_attn_layer_norm=LayerNorm(size), cross_attn=crossing,
        cross_attn_layer_norm=LayerNorm(size),
        mlp=perceptron(size, config.integer("decoder_ffn_dim")), layer_norm=LayerNorm(size),
    )  # fmt: skip


class LightDetrForObjectDetection(DetectorTask):
    def add_head(self, config: ConfigReader) -> None:
        """Classes and boxes."""
        super().add_head(config)
        size = config.integer("d_model")
        self.class_embed = Linear(size, self.spec.num_labels, bias=True)
        self.bbox_embed = multi_layer(size, size, BOX, 3)


class RfDetrForInstanceSegmentation(LightDetrForObjectDetection):
    def add_head(self, config: ConfigReader) -> None:
        """The same, a block for each decoder layer, and the queries' network."""
        size = config.integer("d_model")
        self.segmentation_bias = Weight(1)
        super().add_head(config)
        blocks = (
            Parts(
                layernorm=LayerNorm(size),
                depthwise_conv=Conv2d(size, size, 3, groups=size, bias=True),
                pointwise_conv=Linear(size, size, bias=True),
            )
            for _ in range(config.layers("decoder_layers"))
        )
        self.blocks = listed(blocks)
        self.spatial_features_proj = Conv2d(size, size, 1, bias=True)
        inner = config.integer("intermediate_size")
        self.query_features_block = Parts(norm=LayerNorm(size), mlp=perceptron(size, inner))
        self.query_features_proj = Linear(size, size, bias=True)


class LwDetrModel(Detector):
    bare = DetectorStates
    endings: ClassVar[dict[str, type[PictureTask]]] = {DETECTION: LightDetrForObjectDetection}
    backbone_type = "lw_detr_vit"

    def __init__(self, config: ConfigReader) -> None:
        size = self.width = config.integer("d_model")
        self.context = config.integer("num_queries")
        part = backbone_config(config, self.backbone_type)
        self.backbone = self.backbone_of(config, part)
        groups = config.integer("group_detr")
        self.reference_point_embed = Embedding(self.context * groups, BOX)
        self.query_feat = Embedding(self.context * groups, size)
        kinds = [None] * config.layers("decoder_layers")
        self.decoder = Parts(
            layers=LayerList("decoder.layers", kinds, lambda _: decoder_layer(config, size)),
            layernorm=LayerNorm(size), ref_point_head=multi_layer(2 * size, size, size, 2),
        )  # fmt: skip
        self.enc_output = listed(Linear(size, size, bias=True) for _ in range(groups))
        self.enc_output_norm = listed(LayerNorm(size) for _ in range(groups))
        self.enc_out_bbox_embed = listed(multi_layer(size, size, BOX, 3) for _ in range(groups))
        side = pair(part, "image_size")
        self.picture = self.described(*side, channels=part.integer("num_channels"))

    def add_labels(self, config: ConfigReader, count: int) -> None:
        """What picks the first boxes."""
        groups = config.integer("group_detr")
        made = (Linear(self.width, count, bias=True) for _ in range(groups))
        self.enc_out_class_embed = listed(made)

    def backbone_of(self, config: ConfigReader, part: ConfigReader) -> Parts:
        """The pictures' tower, and what brings its stages together."""
        return Parts(backbone=windowed_vit(part), projector=multi_scale_projector(config, part))


class RfDetrModel(LwDetrModel):
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        DETECTION: LightDetrForObjectDetection,
        "ForInstanceSegmentation": RfDetrForInstanceSegmentation,
    }
    backbone_type = "rf_detr_dinov2"

    def backbone_of(self, config: ConfigReader, part: ConfigReader) -> Parts:
        """The pictures' tower, and what brings its stages together."""
        projected = cross_stage(config, part.integer("hidden_size") * num_features(part))
        norm = LayerNorm(config.integer("d_model"))
        return Parts(
            backbone=dinov2(part), projector=Parts(projector_layer=projected, layer_norm=norm)
        )
