"""Florence-2: DaViT, whose blocks attend over windows and then over channels, written over BART's embeddings.

(transformers 5.23, models/florence2/modeling_florence2.py)
"""

from typing import ClassVar

from memplan.classes.joined.base import VISION
from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import as_tokens, drop_paths
from memplan.classes.pictures.vit import two_linear
from memplan.classes.translating.stacks import (
    ConditionalGeneration,
    DecodedStates,
    Tasks,
    shifted,
)
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, ratio, stage_flags
from memplan.fast_dataclass import dataclass, replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import attention_function, unwidened_attention
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import mean_of_tokens, padded, repeated
from memplan.graph.modules.grids import Conv2d, DropPath
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import KeptLayers, LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import LayerBlock, ModelPart
from memplan.model.spec import ModelSpec

PICTURE_768 = 768
"""What Florence-2's processor makes of every picture [pixels]."""


class Florence2VisionConvEmbed(Module):
    """A convolution, and a norm over channels before it or behind it."""

    def __init__(self, config: ConfigReader, stage: int, widths: list[int]) -> None:
        count = len(widths)
        before = widths[stage - 1] if stage else config.integer("in_channels")
        self.pre_norm = stage_flags(config, "patch_prenorm", count)[stage]
        self.conv = Conv2d(
            before, widths[stage], each_stage(config, "patch_size", count)[stage],
            stride=each_stage(config, "patch_stride", count)[stage],
            padding=each_stage(config, "patch_padding", count, minimum=0)[stage],
        )  # fmt: skip
        self.norm = LayerNorm(before if self.pre_norm else widths[stage])

    def forward(self, hidden_states: Handle) -> Handle:
        if self.pre_norm:
            hidden_states = self.normed(hidden_states)
        hidden_states = self.conv(hidden_states)
        if not self.pre_norm:
            hidden_states = self.normed(hidden_states)
        return hidden_states

    def normed(self, hidden_states: Handle) -> Handle:
        """Over channels."""
        return self.norm(hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets a block apart from those of its stage."""

    stage: int
    spatial: bool
    """Its half in windows drops paths."""
    channel: bool


class Florence2VisionAttention(Module):
    block = LayerBlock.ATTENTION
    key: str
    """What its config calls the number of its heads."""

    def __init__(self, config: ConfigReader, stage: int, widths: list[int]) -> None:
        size = widths[stage]
        self.heads = each_stage(config, self.key, len(widths))[stage]
        self.window_size = config.integer("window_size")
        self.qkv = Linear(size, 3 * size, bias=config.flag("qkv_bias"))
        self.proj = Linear(size, size, bias=True)


class Florence2VisionChannelAttention(Florence2VisionAttention):
    """Each channel sees those of its group, by all positions."""

    key = "num_groups"

    def forward(self, hidden_states: Handle, sides: tuple[int, int]) -> Handle:
        del sides
        batch, tokens, size = hidden_states.shape
        if self.run.kernels.attention.is_package:
            msg = (
                f"attention: flash-attention has no heads of {tokens} numbers, by which DaViT's channels see "
                "one another; choose sdpa or eager"
            )
            raise SetupError(msg)
        qkv = self.qkv(hidden_states).view(batch, tokens, 3, self.heads, size // self.heads)
        qkv = qkv.permute(2, 0, 3, 4, 1)
        query, key, value = qkv.unbind(0)
        attend = attention_function(self.run, unwidened_attention, causal=False)
        hidden_states, _ = attend(query, key, value, None, 0.0)
        hidden_states = hidden_states.permute(0, 3, 2, 1)
        hidden_states = hidden_states.reshape(batch, tokens, size)
        hidden_states = self.proj(hidden_states)
        return hidden_states


class Florence2VisionWindowAttention(Florence2VisionAttention):
    """Each window of patches sees itself; what is missing at the edges is padded."""

    key = "num_heads"

    def forward(self, hidden_states: Handle, sides: tuple[int, int]) -> Handle:
        batch, tokens, size = hidden_states.shape
        side = self.window_size
        down, across = (-(-each // side) for each in sides)
        hidden_states = hidden_states.view(batch, *sides, size)
        hidden_states = padded(hidden_states, (batch, down * side, across * side, size))
        hidden_states = hidden_states.view(batch, down, side, across, side, size)
        windows = hidden_states.permute(0, 1, 3, 2, 4, 5).contiguous()
        windows = windows.view(-1, side * side, size)
        qkv = self.qkv(windows).view(-1, side * side, 3, self.heads, size // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        attend = attention_function(self.run, unwidened_attention, causal=False)
        windows, _ = attend(query, key, value, None, 0.0)
        windows = windows.view(-1, side * side, size)
        windows = self.proj(windows)
        hidden_states = windows.view(batch, down, across, side, side, size)
        hidden_states = hidden_states.permute(0, 1, 3, 2, 4, 5).contiguous()
        hidden_states = hidden_states.view(batch, down * side, across * side, size)
        for dim, (whole, kept) in enumerate(zip(hidden_states.shape[1:3], sides, strict=True), 1):
            if whole != kept:
                hidden_states = hidden_states.narrow(kept, dim)
        return hidden_states.contiguous().view(batch, tokens, size)


class Florence2VisionHalf(Module):
    """Attention and a network, a convolution of each channel before either."""

    attention: ClassVar[str]
    attention_class: ClassVar[type[Florence2VisionAttention]]

    def __init__(self, config: ConfigReader, stage: int, widths: list[int], rate: float) -> None:
        size = widths[stage]
        self.conv1 = Conv2d(size, size, 3, padding=1, groups=size)
        self.norm1 = LayerNorm(size)
        setattr(self, self.attention, self.attention_class(config, stage, widths))
        self.drop_path1 = DropPath(rate)
        self.conv2 = Conv2d(size, size, 3, padding=1, groups=size)
        self.norm2 = LayerNorm(size)
        inner = int(size * ratio(config, "mlp_ratio"))
        self.ffn = two_linear(size, inner, tower_activation(config, "activation_function"))
        self.drop_path2 = DropPath(rate)

    def forward(self, hidden_states: Handle) -> Handle:
        shape = hidden_states.shape
        hidden_states = self.conv1(hidden_states) + hidden_states
        hidden_states = as_tokens(hidden_states)
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states = self.children[self.attention](hidden_states, shape[2:])
        hidden_states = residual + self.drop_path1(hidden_states)
        hidden_states = hidden_states.transpose(1, 2).view(*shape)
        hidden_states = self.conv2(hidden_states) + hidden_states
        hidden_states = as_tokens(hidden_states)
        residual = hidden_states
        hidden_states = self.norm2(hidden_states)
        hidden_states = self.ffn(hidden_states)
        hidden_states = residual + self.drop_path2(hidden_states)
        return hidden_states.transpose(1, 2).view(*shape)


class Florence2VisionSpatialBlock(Florence2VisionHalf):
    attention, attention_class = "window_attn", Florence2VisionWindowAttention


class Florence2VisionChannelBlock(Florence2VisionHalf):
    attention, attention_class = "channel_attn", Florence2VisionChannelAttention


class Florence2VisionBlock(Module):
    def __init__(self, config: ConfigReader, kind: Kind, widths: list[int]) -> None:
        self.spatial_block = Florence2VisionSpatialBlock(config, kind.stage, widths, kind.spatial)
        self.channel_block = Florence2VisionChannelBlock(config, kind.stage, widths, kind.channel)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.spatial_block(hidden_states)
        hidden_states = self.channel_block(hidden_states)
        return hidden_states


class Florence2VisionBackbone(PictureModel):
    prefix = tower = "vision_tower"
    casts = recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        widths = config.integers("embed_dim", minimum=1)
        if not widths:
            error = config.fail("embed_dim", "is empty")
            raise error
        self.widths, self.width = widths, widths[-1]
        depths = each_stage(config, "depths", len(widths))
        rates = [rate > 0 for rate in drop_paths(config, 2 * sum(depths))]
        for stage in range(len(widths)):
            setattr(self, f"convs.{stage}", Florence2VisionConvEmbed(config, stage, widths))
        for stage, depth in enumerate(depths):
            kinds = [Kind(stage, rates.pop(0), rates.pop(0)) for _ in range(depth)]
            layers = KeptLayers(
                f"vision_tower.stage{stage}.layers", kinds,
                lambda kind: Florence2VisionBlock(config, kind, widths),
            )  # fmt: skip
            setattr(self, f"blocks.{stage}", layers)
        self.picture = self.described(PICTURE_768, channels=config.integer("in_channels"))

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = pixel_values.to(self.run.compute)
        for stage in range(len(self.widths)):
            if stage:
                name = f"{self.tower}.stage{stage}.embed"
                begin(self, name, ModelPart.EMBEDDING, hidden_states)
            hidden_states = self.children[f"convs.{stage}"](hidden_states)
            layers = self.children[f"blocks.{stage}"]
            assert isinstance(layers, LayerList)
            for layer in layers:
                hidden_states = layer(hidden_states)
        return (hidden_states,)


class Florence2VisionLearnedAbsolutePositionEmbedding2D(Module):
    def __init__(self, rows: int, size: int) -> None:
        self.row_embeddings = Embedding(rows, size // 2)
        self.column_embeddings = Embedding(rows, size - size // 2)

    def forward(self, image_features: Handle) -> Handle:
        batch, _, height, width = image_features.shape
        width_values, height_values = (
            made_by(self.run, OperationKind.ARANGE, (count,), DType.INT64)
            for count in (width, height)
        )
        x_emb = self.column_embeddings((width,), width_values)
        y_emb = self.row_embeddings((height,), height_values)
        pos = concatenate(
            repeated(x_emb.unsqueeze(0), height, dim=0), repeated(y_emb.unsqueeze(1), width, dim=1)
        )
        pos = pos.permute(2, 0, 1).unsqueeze(0)
        return repeated(pos, batch)


class Florence2MultiModalProjector(Module):
    """Rows and columns as positions; the mean of all patches stands before them."""

    def __init__(self, vision: ConfigReader, size: int) -> None:
        outputs = vision.integer("projection_dim")
        self.frames = vision.integer("max_temporal_embeddings")
        self.image_projection = Linear(size, outputs)
        self.image_proj_norm = LayerNorm(outputs)
        rows = vision.integer("max_position_embeddings")
        self.image_position_embed = Florence2VisionLearnedAbsolutePositionEmbedding2D(rows, size)

    def forward(self, image_features: Handle) -> Handle:
        run, (batch, size, *_) = self.run, image_features.shape
        position_features = image_features + self.image_position_embed(image_features)
        position_features = as_tokens(position_features)
        run.hold_buffer(self.frames * size, run.options.weights)
        visual_token_features = position_features + 0.0
        spatial_image_features = mean_of_tokens(visual_token_features).view(batch, 1, size)
        temporal_image_features = Handle(
            run, run.mean(visual_token_features.record, 1), visual_token_features.shape
        )
        image_features = concatenate(spatial_image_features, temporal_image_features, dim=1)
        image_features = self.image_projection(image_features)
        image_features = self.image_proj_norm(image_features)
        return image_features


class Florence2ForConditionalGeneration(ConditionalGeneration):
    """Its matrix of logits has no buffer behind it, as BART's does."""

    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch)


class Florence2Model(ProjectedModel):
    text = PartSpec(key="text_config", model_type="bart")
    tasks: ClassVar[Tasks] = {
        TaskKind.SEQ2SEQ_LM: Florence2ForConditionalGeneration, TaskKind.BASE: DecodedStates,
    }  # fmt: skip
    returns_features = False

    def __init__(self, config: ConfigReader) -> None:
        vision = read_part(config, PartSpec(key=VISION)).reader
        tower = self.add_tower(config)
        self.multi_modal_projector = Florence2MultiModalProjector(vision, tower.width)
        self.add_text(config)

    def told(self, model: ModelSpec, task: TaskKind | None) -> ModelSpec:
        """Its logits are cast before the loss."""
        del task
        return replace(model, head=replace(model.head, loss_upcast=True))
