"""SAM 2 for videos: Hiera, and a memory of earlier frames; it is counted, for its class runs under
``torch.inference_mode`` alone.

(transformers 5.23, models/sam2_video/modeling_sam2_video.py, models/sam2/modeling_sam2.py)
"""

from itertools import pairwise
from math import log2
from typing import ClassVar

from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask
from memplan.classes.pictures.parts import InOrder
from memplan.classes.segmenting.sam import (
    SamAttention,
    SamFeedForward,
    SamMaskDecoder,
    SamPromptEncoder,
    SamTwoWayAttentionBlock,
    SamTwoWayTransformer,
    parts_of,
)
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.sizes import each_stage, few, pair, ratio
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.layer_list import KeptLayers, LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader

MEMORY_WIDTH = 64
"""Of what the memory attention reads, written out in ``Sam2VideoMemoryAttentionLayer``."""
BLOCKS = [1, 2, 7, 2]
WIDTHS = [96, 192, 384, 768]
WINDOWS = [8, 4, 14, 7]
BACKGROUND = (7, 7)
PATCH_KERNEL = (7, 7)
"""What ``Sam2HieraDetConfig`` takes where the config has none."""


class Sam2MultiScaleBlock(Module):
    """The first block of a stage widens."""

    def __init__(self, before: int, after: int, times: float) -> None:
        inner = int(after * times)
        self.layer_norm1, self.layer_norm2 = LayerNorm(before), LayerNorm(after)
        self.attn = InOrder(
            qkv=Linear(before, 3 * after, bias=True), proj=Linear(after, after, bias=True)
        )
        self.mlp = SamFeedForward(after, inner, after, 2)
        if before != after:
            self.proj = Linear(before, after, bias=True)


class Sam2HieraDetModel(Module):
    def __init__(self, config: ConfigReader) -> None:
        blocks = config.integers("blocks_per_stage", minimum=1) or BLOCKS
        self.widths = WIDTHS
        if config.raw("embed_dim_per_stage") is not None:
            self.widths = each_stage(config, "embed_dim_per_stage", len(blocks))
        window = (config.integers("window_size_per_stage") or WINDOWS)[0]
        size, channels = config.integer("hidden_size"), config.integer("num_channels")
        background = _pair(
            config, "window_positional_embedding_background_size", default=BACKGROUND
        )
        self.pos_embed = Weight(1, size, *background)
        self.pos_embed_window = Weight(1, size, window, window)
        kernel = _pair(config, "patch_kernel_size", default=PATCH_KERNEL)
        self.patch_embed = InOrder(projection=Conv2d(channels, size, *kernel))
        times = ratio(config, "mlp_ratio", default=4)
        stages = pairwise([self.widths[0], *self.widths])
        kinds = [
            (before if not number else after, after)
            for count, (before, after) in zip(blocks, stages, strict=True)
            for number in range(count)
        ]
        self.blocks = LayerList(
            "vision_encoder.backbone.layers",
            kinds,
            lambda kind: Sam2MultiScaleBlock(kind[0], kind[1], times),
        )


def _pair(config: ConfigReader, key: str, *, default: tuple[int, int]) -> tuple[int, int]:
    return pair(config, key) if config.raw(key) is not None else default


class Sam2VisionModel(Module):
    """Hiera, and a convolution on each stage to one width."""

    def __init__(self, config: ConfigReader) -> None:
        part = PartSpec(key="backbone_config", model_type="sam2_hiera_det_model")
        self.backbone = Sam2HieraDetModel(read_part(config, part).reader)
        channels = config.integers("backbone_channel_list", minimum=1) or self.backbone.widths[::-1]
        out, kernel = config.integer("fpn_hidden_size"), config.integer("fpn_kernel_size")
        self.neck = InOrder(
            **{f"convs.{index}": Conv2d(size, out, kernel) for index, size in enumerate(channels)}
        )


class Sam2VideoPromptEncoder(SamPromptEncoder):
    """Its points' rows stand in one table."""

    def points(self, config: ConfigReader) -> Module:
        return Embedding(config.integer("num_point_embeddings"), self.size)


class Sam2VideoTwoWayAttentionBlock(SamTwoWayAttentionBlock):
    def rate(self, config: ConfigReader) -> int:
        """As the config says."""
        return config.integer("attention_downsample_rate")

    def network(self, config: ConfigReader, size: int) -> Module:
        """Of as many layers as there are of these."""
        return SamFeedForward(
            size, config.integer("mlp_dim"), size, few(config, "num_hidden_layers")
        )


class Sam2VideoTwoWayTransformer(SamTwoWayTransformer):
    layer_class = Sam2VideoTwoWayAttentionBlock


class Sam2VideoMaskDecoder(SamMaskDecoder):
    """It scores whether an object is there at all."""

    transformer_class = Sam2VideoTwoWayTransformer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        size = self.size
        self.conv_s0, self.conv_s1 = Conv2d(size, size // 8, 1), Conv2d(size, size // 4, 1)
        self.obj_score_token = Embedding(1, size)
        self.pred_obj_score_head = SamFeedForward(size, size, 1, 3)


class Sam2VideoMemoryAttentionLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("memory_attention_hidden_size")
        rate = config.integer("memory_attention_downsample_rate")
        inner = config.integer("memory_attention_feed_forward_hidden_size")
        self.self_attn = SamAttention(size, 1, rate)
        self.cross_attn_image = SamAttention(size, 1, rate, MEMORY_WIDTH)
        self.linear1, self.linear2 = Linear(size, inner, bias=True), Linear(inner, size, bias=True)
        for number in range(1, 4):
            setattr(self, f"layer_norm{number}", LayerNorm(size))


class Sam2VideoMemoryFuserCXBlock(Module):
    def __init__(self, config: ConfigReader) -> None:
        width, inner = (
            config.integer(f"memory_fuser_{key}") for key in ("embed_dim", "intermediate_dim")
        )
        kernel = config.integer("memory_fuser_kernel_size")
        self.depthwise_conv = Conv2d(width, width, kernel, groups=width)
        self.layer_norm = LayerNorm(width)
        self.pointwise_conv1 = Linear(width, inner, bias=True)
        self.pointwise_conv2 = Linear(inner, width, bias=True)
        self.scale = Weight(width)


def mask_downsampler(config: ConfigReader) -> InOrder:
    """A mask made small step by step; the defaults are ``Sam2VideoConfig``'s."""
    kernel = config.integer("mask_downsampler_kernel_size", default=3)
    stride = config.integer("mask_downsampler_stride", default=2, minimum=2)
    total = config.integer("mask_downsampler_total_stride", default=16)
    channels, made = 1, InOrder()
    for index in range(int(log2(total) // log2(stride))):
        wider = channels * stride**2
        layer = InOrder(conv=Conv2d(channels, wider, kernel), layer_norm=LayerNorm(wider))
        setattr(made, f"layers.{index}", layer)
        channels = wider
    made.final_conv = Conv2d(channels, config.integer("mask_downsampler_embed_dim", default=256), 1)
    return made


class Sam2VideoMemoryEncoder(Module):
    """The mask, joined with the frame's features."""

    def __init__(self, config: ConfigReader) -> None:
        size, out = (
            config.integer(f"memory_encoder_{key}") for key in ("hidden_size", "output_channels")
        )
        self.mask_downsampler = mask_downsampler(config)
        self.feature_projection, self.projection = Conv2d(size, size, 1), Conv2d(size, out, 1)
        count = config.layers("memory_fuser_num_layers")
        self.fuser = KeptLayers(
            "memory_encoder.fuser", [None] * count, lambda _: Sam2VideoMemoryFuserCXBlock(config)
        )


class Sam2VideoModel(PictureModel):
    prefix = ""
    recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}
    counted_as = " (its class runs under torch.inference_mode alone)"

    def __init__(self, config: ConfigReader) -> None:
        vision, prompts, masks = parts_of(config, "vision", "prompt_encoder", "mask_decoder")
        self.width = size = vision.integer("fpn_hidden_size")
        self.vision_encoder = Sam2VisionModel(vision)
        self.prompt_encoder = Sam2VideoPromptEncoder(prompts, None)
        self.mask_decoder = Sam2VideoMaskDecoder(masks)
        self.add_memory(config, size)
        self.picture = self.described(0, channels=0)

    def add_memory(self, config: ConfigReader, size: int) -> None:
        """What it attends to, and what it owns itself."""
        count = config.layers("memory_attention_num_layers")
        self.memory_attention = InOrder(
            layers=LayerList(
                "memory_attention.layers",
                [None] * count,
                lambda _: Sam2VideoMemoryAttentionLayer(config),
            ),
            layer_norm=LayerNorm(config.integer("memory_attention_hidden_size")),
        )
        self.memory_encoder = Sam2VideoMemoryEncoder(config)
        width = config.integer("memory_encoder_output_channels")
        self.no_memory_embedding = Weight(1, 1, size)
        self.no_memory_positional_encoding = Weight(1, 1, size)
        self.memory_temporal_positional_encoding = Weight(
            config.integer("num_maskmem"), 1, 1, width
        )
        self.no_object_pointer = Weight(1, size)
        if config.flag("enable_occlusion_spatial_embedding"):
            self.occlusion_spatial_embedding_parameter = Weight(1, width)
        if config.flag("enable_temporal_pos_encoding_for_object_pointers"):
            projection = Linear(size, width, bias=True)
            self.temporal_positional_encoding_projection_layer = projection
        self.mask_downsample = Conv2d(1, 1, 4)
        self.object_pointer_proj = SamFeedForward(size, size, size, 3)

    def left_out(self, ending: str) -> bool:
        """Always."""
        del ending
        return True
