"""D-FINE: boxes as distributions that every decoder layer makes finer.

(transformers 5.23: models/d_fine, models/hgnet_v2)
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
)
from memplan.classes.pictures.base import PICTURE, PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.families.towers.sizes import (
    MAX_PARTS,
    at_least_one,
    each_stage,
    few,
    ratio,
    stage_flags,
)
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.grids import BatchNorm, Conv2d
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader


class HGNet:
    """HGNetV2: blocks that keep what each of their layers made, and squeeze it all at the end.

    Without ``trained`` norms these own buffers only.
    """

    def __init__(self, config: ConfigReader, *, trained: bool) -> None:
        self.config, self.trained = config, trained
        self.affine = config.flag("use_learnable_affine_block")
        self.sizes = at_least_one(config, "stage_out_channels")

    def convolution(self, *sizes: int, groups: int = 1, active: bool = True) -> Parts:
        """``HGNetV2ConvLayer``: behind an activation a scale and a bias may follow."""
        made = Parts(convolution=Conv2d(*sizes, groups=groups, bias=False))
        if self.trained:
            made.normalization = BatchNorm(sizes[1])
        if active and self.affine:
            made.lab = Parts(scale=Weight(1), bias=Weight(1))
        return made

    def tower(self) -> Parts:
        """Stem and stages."""
        first, middle, last = each_stage(self.config, "stem_channels", 3)
        embedder = Parts(
            stem1=self.convolution(first, middle, 3),
            stem2a=self.convolution(middle, middle // 2, 2),
            stem2b=self.convolution(middle // 2, middle, 2),
            stem3=self.convolution(2 * middle, middle, 3),
            stem4=self.convolution(middle, last, 1),
        )
        count = len(self.sizes)
        incoming = each_stage(self.config, "stage_in_channels", count)
        blocks = each_stage(self.config, "stage_num_blocks", count)
        narrowed = stage_flags(self.config, "stage_downsample", count)
        stages = []
        for index, size in enumerate(self.sizes):
            before, stage = incoming[index], Parts()
            if narrowed[index]:
                stage.downsample = self.convolution(before, before, 3, groups=before, active=False)
            stage.blocks = listed(
                self.block(index, size if place else before, size) for place in range(blocks[index])
            )
            stages.append(stage)
        return Parts(embedder=embedder, encoder=Parts(stages=listed(stages)))

    def block(self, index: int, before: int, after: int) -> Parts:
        """``HGNetV2BasicLayer``; a light one has a plain and a depthwise convolution in each layer."""
        config, count = self.config, len(self.sizes)
        middle = each_stage(config, "stage_mid_channels", count)[index]
        kernel = each_stage(config, "stage_kernel_size", count)[index]
        depth = each_stage(config, "stage_numb_of_layers", count, maximum=MAX_PARTS)[index]
        light = stage_flags(config, "stage_light_block", count)[index]
        layers = []
        for layer in range(depth):
            given = middle if layer else before
            if not light:
                layers.append(self.convolution(given, middle, kernel))
                continue
            conv1 = self.convolution(given, middle, 1, active=False)
            conv2 = self.convolution(middle, middle, kernel, groups=middle)
            layers.append(Parts(conv1=conv1, conv2=conv2))
        last = [
            self.convolution(before + depth * middle, after // 2, 1),
            self.convolution(after // 2, after, 1),
        ]
        return Parts(layers=listed(layers), aggregation=listed(last))

    def channels(self) -> list[int]:
        """Of the stages that ``out_features`` name; of the last one where there is none."""
        known = {f"stage{index}": each for index, each in enumerate(self.sizes, 1)}
        named = self.config.texts("out_features")
        for each in named:
            self.config.choice("out_features", each, known)
        return [known[each] for each in named] or self.sizes[-1:]


def plain_conv_norm(before: int, after: int, kernel: int) -> Parts:
    """The same as ``torch.nn.Sequential``."""
    return listed([Conv2d(before, after, kernel, bias=False), BatchNorm(after)])


def encoder_layer(config: ConfigReader, size: int) -> Parts:
    """Attention on the smallest features only."""
    return Parts(
        self_attn=attention(size), self_attn_layer_norm=LayerNorm(size),
        mlp=multi_layer(size, config.integer("encoder_ffn_dim"), size, 2),
        final_layer_norm=LayerNorm(size),
    )  # fmt: skip


def elan(size: int, narrow: int, bottlenecks: int) -> Parts:
    """``DFineRepNCSPELAN4``."""

    def chain(before: int) -> Parts:
        made = (
            Parts(conv1=conv_norm(narrow, narrow, 3), conv2=conv_norm(narrow, narrow, 1))
            for _ in range(bottlenecks)
        )
        return Parts(
            conv1=conv_norm(before, narrow, 1), conv2=conv_norm(before, narrow, 1),
            bottlenecks=listed(made),
        )  # fmt: skip

    return Parts(
        conv1=conv_norm(2 * size, 2 * size, 1), csp_rep1=chain(size),
        conv2=conv_norm(narrow, narrow, 3), csp_rep2=chain(narrow),
        conv3=conv_norm(narrow, narrow, 3), conv4=conv_norm(2 * size + 2 * narrow, size, 1),
    )  # fmt: skip


def hybrid_encoder(config: ConfigReader) -> Parts:
    """Paths up and down between the stages."""
    size = config.integer("encoder_hidden_dim")
    attended = len(config.integers("encode_proj_layers")) * config.layers("encoder_layers")
    paths = range(len(at_least_one(config, "encoder_in_channels")) - 1)
    narrow = round(ratio(config, "hidden_expansion") * size // 2)
    bottlenecks = round(3 * ratio(config, "depth_mult", default=1))
    layers = LayerList("encoder.layers", [None] * attended, lambda _: encoder_layer(config, size))
    down = (
        Parts(conv1=conv_norm(size, size, 1), conv2=conv_norm(size, size, 3, groups=size))
        for _ in paths
    )
    return Parts(
        aifi=layers, lateral_convs=listed(conv_norm(size, size, 1) for _ in paths),
        fpn_blocks=listed(elan(size, narrow, bottlenecks) for _ in paths),
        downsample_convs=listed(down),
        pan_blocks=listed(elan(size, narrow, bottlenecks) for _ in paths),
    )  # fmt: skip


def last_layer(config: ConfigReader) -> int:
    """The layer whose boxes are taken; later ones only teach."""
    count = config.layers("decoder_layers")
    index = config.integer("eval_idx", default=-1, minimum=-count, maximum=count - 1)
    return index if index >= 0 else count + index


def decoder_layer(config: ConfigReader, size: int) -> Module:
    """A gate in the place of the second sum."""
    heads, levels = config.integer("decoder_attention_heads"), few(config, "num_feature_levels")
    if isinstance(config.raw("decoder_n_points"), list):
        points = heads * sum(each_stage(config, "decoder_n_points", levels))
    else:
        points = heads * levels * config.integer("decoder_n_points")
    return Parts(
        self_attn=attention(size), self_attn_layer_norm=LayerNorm(size),
        encoder_attn=Parts(**deformable(size, points)),
        mlp=multi_layer(size, config.integer("decoder_ffn_dim"), size, 2),
        final_layer_norm=LayerNorm(size),
        gateway=Parts(gate=Linear(2 * size, 2 * size, bias=True), norm=LayerNorm(size)),
    )  # fmt: skip


def decoder(config: ConfigReader, size: int) -> Parts:
    """Layers, and what makes boxes and their quality of what these give."""
    count, last = config.layers("decoder_layers"), last_layer(config)
    kinds = [None] * (2 * count - last - 1)
    seen = BOX * (config.integer("top_prob_values") + 1)
    inner, depth = config.integer("lqe_hidden_dim"), max(1, few(config, "lqe_layers"))
    quality = (Parts(reg_conf=multi_layer(seen, inner, 1, depth)) for _ in range(count))
    return Parts(
        reg_scale=Weight(1, trainable=False), up=Weight(1, trainable=False),
        layers=LayerList("decoder.layers", kinds, lambda _: decoder_layer(config, size)),
        query_pos_head=multi_layer(BOX, 2 * size, size, 2),
        pre_bbox_head=multi_layer(size, size, BOX, 3), lqe_layers=listed(quality),
    )  # fmt: skip


class DFineForObjectDetection(DetectorTask):
    def add_head(self, config: ConfigReader) -> None:
        """Classes and distributions for each layer; the decoder's own are these."""
        super().add_head(config)
        size, labels = self.model.width, self.spec.num_labels
        count, last = config.layers("decoder_layers"), last_layer(config)
        bins = BOX * (config.integer("max_num_bins") + 1)
        scaled = round(ratio(config, "layer_scale", default=1) * size)
        self.class_embed = listed(Linear(size, labels, bias=True) for _ in range(count))
        widths = [size] * (last + 1) + [scaled] * (count - last - 1)
        self.bbox_embed = listed(multi_layer(each, each, bins, 3) for each in widths)


class DFineModel(Detector):
    bare = DetectorStates
    endings: ClassVar[dict[str, type[PictureTask]]] = {DETECTION: DFineForObjectDetection}

    def __init__(self, config: ConfigReader) -> None:
        size = self.width = config.integer("d_model")
        self.context = config.integer("num_queries")
        frozen = config.flag("freeze_backbone_batch_norms")
        net = HGNet(backbone_config(config, "hgnet_v2"), trained=not frozen)
        self.backbone = Parts(model=net.tower())
        channels = at_least_one(config, "decoder_in_channels")
        width = config.integer("encoder_hidden_dim")
        used = net.channels()[: len(channels)]
        self.encoder_input_proj = listed(plain_conv_norm(each, width, 1) for each in used)
        self.encoder = hybrid_encoder(config)
        if config.flag("learn_initial_query"):
            self.weight_embedding = Embedding(self.context, size)
        self.enc_output = listed([Linear(size, size, bias=True), LayerNorm(size)])
        self.enc_bbox_head = multi_layer(size, size, BOX, 3)
        if channels[-1] != size:
            # A convolution for each level, where the encoder's width is not the decoder's.
            levels = range(max(few(config, "num_feature_levels"), len(channels)))
            self.decoder_input_proj = listed(
                plain_conv_norm(channels[-1], size, 1 if level < len(channels) else 3)
                for level in levels
            )
        self.decoder = decoder(config, size)
        self.picture = self.described(PICTURE, channels=net.config.integer("num_channels"))

    def add_labels(self, config: ConfigReader, count: int) -> None:
        """What picks the first boxes, and embeddings of labels that training disturbs."""
        self.enc_score_head = Linear(self.width, count, bias=True)
        if config.integer("num_denoising", minimum=0):
            self.denoising_class_embed = Embedding(count + 1, self.width)
