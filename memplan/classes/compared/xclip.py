"""X-CLIP: CLIP over the frames of a clip, which send messages; prompts that read what is seen.

(transformers 5.23, models/x_clip/modeling_x_clip.py)
"""

from memplan.classes.compared.clip import (
    CLIPAttention,
    CLIPEncoderLayer,
    CLIPTextModel,
    CLIPVisionModel,
)
from memplan.classes.compared.two_towers import ONE_CLASS, NormsDivide
from memplan.classes.pictures.base import begin, begin_tower
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import same_class, towers
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import attention_function, in_heads
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.contractions import einsum, matmul
from memplan.graph.modules.functional import expanded
from memplan.graph.modules.grids import DropPath, mean_along
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import KeptLayers, LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart


class XCLIPVisionEncoderLayer(CLIPEncoderLayer):
    """Each frame's first token tells the others of its clip something, which stands behind its patches."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, CLIPAttention(config, size))
        self.num_frames = config.integer("num_frames")
        self.message_fc = Linear(size, size, bias=True)
        self.message_ln = LayerNorm(size)
        self.message_attn = CLIPAttention(config, size)
        self.drop_path = DropPath(config.number("drop_path_rate", default=0.0))

    def forward(self, hidden_states: Handle, attention_mask: Handle | None) -> Handle:
        frames, length, size = hidden_states.shape
        msg_token = self.message_fc(hidden_states.select(1))
        msg_token = msg_token.view(frames // self.num_frames, self.num_frames, size)
        told = self.message_attn(self.message_ln(msg_token), None)[0]
        msg_token = msg_token + self.drop_path(told)
        del told
        msg_token = msg_token.view(frames, 1, size)
        hidden_states = concatenate(hidden_states, msg_token, dim=1)
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, attention_mask)
        hidden_states = residual + hidden_states
        hidden_states = hidden_states.narrow(length, 1)
        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class XCLIPVisionModel(CLIPVisionModel):
    """It is given all frames as pictures."""

    first_norm = "pre_layernorm"

    def layer(self, config: ConfigReader) -> CLIPEncoderLayer:
        """With messages."""
        return XCLIPVisionEncoderLayer(config, self.width)


class FramesTransformer(Module):
    """``XCLIPMultiframeIntegrationTransformer``."""

    def __init__(self, config: ConfigReader) -> None:
        names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        own = same_class(
            config, {**config.config, **{name: config.integer(f"mit_{name}") for name in names}}
        )
        size = own.integer("hidden_size")
        self.position_embedding = Weight(1, config.integer("num_frames"), size)
        kinds = [None] * own.layers("num_hidden_layers")
        self.layers = LayerList(
            "mit.encoder.layers", kinds, lambda _: CLIPEncoderLayer(own, CLIPAttention(own, size))
        )
        self.children["encoder.layers"] = self.children.pop("layers")

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        residual = hidden_states
        begin(self, "mit.embed", ModelPart.EMBEDDING, hidden_states)
        hidden_states = hidden_states + self.operand(self.position_embedding)
        last_hidden_state = hidden_states
        for encoder_layer in self.layers:
            last_hidden_state = encoder_layer(last_hidden_state, None)
        begin(self, "mit.clip", ModelPart.OTHER, last_hidden_state)
        last_hidden_state = last_hidden_state.to(hidden_states.dtype) + residual
        batch, _, width = last_hidden_state.shape
        pooled_output = mean_along(last_hidden_state, 1).view(batch, width)
        return last_hidden_state, pooled_output


class CrossAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.head_dim = size // config.integer("prompt_num_attention_heads")
        self.k_proj, self.v_proj, self.q_proj = (Linear(size, size) for _ in range(3))
        self.proj = Linear(size, size, bias=True)
        self.attn_drop = config.number("prompt_attention_dropout", default=0.0)
        self.proj_drop = Dropout(config.number("prompt_projection_dropout", default=0.0))

    def forward(self, queries: Handle, keys: Handle, values: Handle) -> Handle:
        shape = queries.shape[:2]
        queries = in_heads(self.q_proj(queries), self.head_dim)
        keys = in_heads(self.k_proj(keys), self.head_dim)
        values = in_heads(self.v_proj(values), self.head_dim)
        attend = attention_function(self.run, causal=False)
        attn_output, attn_weights = attend(queries, keys, values, None, self.attn_drop)
        attn_output = attn_output.reshape(*shape, -1)
        attn_output = self.proj(attn_output)
        attn_output = self.proj_drop(attn_output)
        del attn_weights
        return attn_output


class PromptGeneratorLayer(Module):
    """Texts read what is seen; the network is four times as wide inside."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.cross_attn = CrossAttention(config, size)
        self.norm1, self.norm3 = LayerNorm(size), LayerNorm(size)
        self.mlp = InOrder(
            _0=Linear(size, 4 * size, bias=True),
            _1=ActivationModule(tower_activation(config, "prompt_hidden_act")),
            _2=Dropout(config.number("prompt_attention_dropout", default=0.0)),
            _3=Linear(4 * size, size, bias=True),
        )
        self.mlp.block = LayerBlock.NETWORK

    def forward(self, hidden_states: Handle, visual: Handle) -> Handle:
        hidden_states = hidden_states + self.cross_attn(self.norm1(hidden_states), visual, visual)
        hidden_states = hidden_states + self.mlp(self.norm3(hidden_states))
        return hidden_states


class PromptGenerator(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        self.layernorm = LayerNorm(size)
        kinds = [None] * config.layers("prompt_layers")
        self.decoder = KeptLayers(
            "prompts.decoder", kinds, lambda _: PromptGeneratorLayer(config, size)
        )
        self.alpha = Weight(size)

    def forward(self, text: Handle, visual: Handle) -> Handle:
        visual = self.layernorm(visual)
        for layer in self.decoder:
            text = layer(text, visual)
        begin(self, "head", ModelPart.HEAD, text)
        return self.operand(self.alpha) * text


class XCLIPModel(NormsDivide):
    """Its batch has as many clips as texts."""

    family = "xclip"
    endings = ONE_CLASS
    vision_class = XCLIPVisionModel
    text_class = CLIPTextModel

    def __init__(self, config: ConfigReader) -> None:
        _, vision = towers(config, self.family)
        self.frames = vision.integer("num_frames")
        self.vision_config = vision
        super().__init__(config)

    def add_own(self, config: ConfigReader) -> None:
        """The layers over frames, and prompts, beside CLIP's projections."""
        super().add_own(config)
        self.visual_projection.segment, vision = None, self.vision_config
        size, width = self.vision_model.width, config.integer("projection_dim")
        self.prompts_visual_layernorm = LayerNorm(size)
        self.prompts_visual_projection = Weight(size, width)
        self.mit = FramesTransformer(vision)
        self.prompts_generator = PromptGenerator(config, width)

    def pixels_shape(self) -> tuple[int, ...]:
        """Of the batch's clips."""
        batch, *picture = super().pixels_shape()
        return batch, self.frames, *picture

    def begin_head(self, given: Handle) -> None:
        """What is projected of texts, which prompts are added to."""
        begin(self, "prompts.begin", ModelPart.OTHER, given)

    def seen(self, patches: Handle, batch: int, width: int) -> Handle:
        """A vector of each place, the mean of all frames'."""
        img_features = patches.narrow(patches.shape[1] - 1, 1)
        img_features = self.prompts_visual_layernorm(img_features)
        rows = img_features.view(-1, img_features.shape[-1])
        img_features = matmul(rows, self.operand(self.prompts_visual_projection))
        del rows
        img_features = img_features.view(batch, self.frames, -1, width)
        _, _, places, _ = img_features.shape
        return mean_along(img_features, 1).view(batch, places, width)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        batch, frames, *picture = pixel_values.shape
        vision_outputs = self.vision_model(pixel_values.view(batch * frames, *picture))
        video_embeds = vision_outputs[1]
        begin(self, "projected", ModelPart.OTHER, video_embeds)
        video_embeds = self.visual_projection(video_embeds)
        width = video_embeds.shape[-1]
        cls_features = video_embeds.view(batch, frames, width)
        mit_outputs = self.mit(cls_features)
        video_embeds = mit_outputs[1]
        self.run.finish(video_embeds.record)
        self.run.start("seen", None, part=ModelPart.OTHER, frozen=False)
        img_features = self.seen(vision_outputs[0], batch, width)
        self.run.finish(img_features.record)
        begin_tower(self, "text_model")
        text_outputs = self.text_outputs()
        text_embeds = self.text_projection(text_outputs[1])
        text_embeds = expanded(text_embeds, (batch, *text_embeds.shape))
        text_embeds = text_embeds + self.prompts_generator(text_embeds, img_features)
        video_embeds = self.divided(video_embeds)
        text_embeds = self.divided(text_embeds)
        logit_scale = self.operand(self.logit_scale).unary(OperationKind.EXP)
        logits_per_video = einsum("bd,bkd->bk", video_embeds, logit_scale * text_embeds)
        return (
            logits_per_video,
            video_embeds,
            text_embeds,
            *mit_outputs,
            *vision_outputs,
            *text_outputs,
        )
