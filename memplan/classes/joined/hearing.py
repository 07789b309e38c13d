"""Language models that hear by Whisper's encoder or its like: Qwen2-Audio, Voxtral, GLM-ASR.

(transformers 5.23, modeling_*.py of models/qwen2_audio, models/voxtral and models/glmasr)
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from memplan.classes.joined.base import JoinedModel
from memplan.classes.pictures.base import as_tower, begin_tower
from memplan.classes.pictures.parts import InOrder
from memplan.classes.pictures.vit import Heads, two_linear
from memplan.classes.sounds.recognition import SoundStack
from memplan.classes.sounds.whisper import WhisperEncoder
from memplan.dtypes import DType
from memplan.families.llama import rotated_dim
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.attended_loss import picked_rows
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import Attended, in_heads
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, dropout
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import activated, read_in_rows
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, apply_rotary_to_part
from memplan.graph.towers.state import sensed
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.networks import Activation
from memplan.model.pictures import PictureSpec
from memplan.model.sounds import SoundSpec
from memplan.model.spec import ModelSpec

EAR = "audio_tower"
QWEN2 = PartSpec(key="text_config", model_type="qwen2")
GLM_ASR_TEXT: Mapping[str, object] = {
    "vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
VOXTRAL_TEXT: Mapping[str, object] = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "head_dim": 128,
}  # fmt: skip


class Ear(SoundStack):
    """An encoder of clips as another model's tower."""

    tower = "encoder"
    casts = True
    """It casts its clips itself."""
    rows_key = "max_source_positions"
    """What its config calls its tokens: half as many as frames."""

    def clips(self, config: ConfigReader) -> SoundSpec:
        """Of 30 seconds, to which all are padded."""
        length = 2 * config.integer(self.rows_key)
        bins = config.integer("num_mel_bins")
        return SoundSpec(channels=bins, length=length, casts=self.casts)


class VoxtralEncoder(Ear, WhisperEncoder):
    def forward(self, input_features: Handle) -> Handle:
        input_features = input_features.to(self.run.compute)
        inputs_embeds = activated(self.conv1(input_features), Activation.GELU)
        inputs_embeds = activated(self.conv2(inputs_embeds), Activation.GELU)
        inputs_embeds = inputs_embeds.permute(0, 2, 1)
        hidden_states = self.placed(inputs_embeds)
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = read_in_rows(hidden_states)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, None)
        hidden_states = self.pooled(hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states

    def placed(self, inputs_embeds: Handle) -> Handle:
        """With a row of the table for each frame."""
        embed_pos = self.operand(self.embed_positions.weight)
        return (inputs_embeds + embed_pos).to(inputs_embeds.dtype)

    def pooled(self, hidden_states: Handle) -> Handle:
        """What the norm reads."""
        return hidden_states


class Qwen2AudioEncoder(VoxtralEncoder):
    def placed(self, inputs_embeds: Handle) -> Handle:
        return inputs_embeds + self.operand(self.embed_positions.weight)

    def pooled(self, hidden_states: Handle) -> Handle:
        """``torch.nn.AvgPool1d(2)`` of the frames, which keeps them: behind the layers."""
        run, norm = self.run, self.layer_norm
        assert norm.segment is not None
        run.start(
            norm.segment[0], hidden_states.record, part=norm.segment[1],
            frozen=norm.is_frozen(norm.segment[1], EAR),
        )  # fmt: skip
        batch, length, size = hidden_states.shape
        made = empty(run, (batch, length // 2, size), hidden_states.dtype)
        run.record(
            OperationKind.MEAN, (hidden_states.record,), (made.record,),
            saves=(hidden_states.record,), gradients=(Gradient.FRESH,),
        )  # fmt: skip
        return hidden_states.leads_to(made, in_rows(hidden_states.shape))


class GlmAsrAttention(Heads):
    names = "q_proj", "k_proj", "v_proj"
    dropout_key = "attention_dropout"

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        del config
        return True, False, True

    def forward(self, hidden_states: Handle, tables: Tables) -> Attended:
        query_states, key_states, value_states = (
            in_heads(self.children[name](hidden_states), self.head_dim) for name in self.names
        )
        query_states, key_states = apply_rotary_to_part(query_states, key_states, *tables)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states)
        attn_output = attn_output.view(*hidden_states.shape[:2], -1)
        attn_output = self.children[self.output](attn_output)
        return attn_output, attn_weights


class GlmAsrEncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.self_attn = GlmAsrAttention(config, size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.input_layernorm, self.post_attention_layernorm = LayerNorm(size), LayerNorm(size)

    def forward(self, hidden_states: Handle, tables: Tables) -> Handle:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, tables)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class GlmAsrEncoder(Ear):
    """Rotary positions, and heads as a decoder names them."""

    casts = False
    norm = "norm"
    rows_key = "max_position_embeddings"

    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        self.conv1 = Conv1d(config.integer("num_mel_bins"), size, 3, padding=1)
        self.conv2 = Conv1d(size, size, 3, stride=2, padding=1)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList("encoder.layers", kinds, lambda _: GlmAsrEncoderLayer(config))
        self.add_norm(LayerNorm(size))
        attention: Any = self.layers.made[None].children["self_attn"]
        self.rotary_emb = RotaryEmbedding(rotated_dim(config, attention.head_dim, 1.0))

    def forward(self, input_features: Handle) -> Handle:
        inputs_embeds = activated(self.conv1(input_features), Activation.GELU)
        inputs_embeds = activated(self.conv2(inputs_embeds), Activation.GELU)
        inputs_embeds = inputs_embeds.transpose(1, 2)
        hidden_states = inputs_embeds
        shape = 1, hidden_states.shape[1]
        position_ids = made_by(self.run, OperationKind.ARANGE, shape, DType.INT64)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        del position_ids
        hidden_states = read_in_rows(hidden_states)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, position_embeddings)
        hidden_states = self.children["norm"](hidden_states)
        return hidden_states


class HeardModel(JoinedModel):
    """A clip of each sample goes through an encoder and a projector."""

    picture = PictureSpec(channels=0, image=(0, 0))
    ear_class: ClassVar[Any]
    ear_type: ClassVar[str]

    def __init__(self, config: ConfigReader) -> None:
        audio = read_part(config, PartSpec(key="audio_config", model_type=self.ear_type)).reader
        self.audio_tower = self.ear_class(audio)
        as_tower(self.audio_tower, EAR)
        self.sound = self.audio_tower.clips(audio)
        self.add_projector(config, audio, self.text_width(config))
        self.add_text(config)

    def add_projector(self, config: ConfigReader, audio: ConfigReader, outputs: int) -> None:
        """What leads to the text."""
        self.joined_width = audio.integer("intermediate_size", "encoder_ffn_dim")
        self.multi_modal_projector = InOrder(**self.projector(config, self.joined_width, outputs))

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> dict[str, Module]:
        """Its modules."""
        raise NotImplementedError

    def get_image_features(self) -> Handle:
        run, tower, sound = self.run, self.audio_tower, self.sound
        assert sound is not None
        shape = run.options.batch_size, sound.channels, sound.length
        begin_tower(tower, EAR)
        clips = Handle(run, sensed(run, prod(shape), casts=tower.casts), shape)
        audio_hidden_states = tower(clips)
        self.begin_projector(audio_hidden_states)
        audio_hidden_states = self.side_by_side(audio_hidden_states)
        found: Handle = self.multi_modal_projector(audio_hidden_states)
        return found

    def side_by_side(self, frames: Handle) -> Handle:
        """Several frames as one token."""
        return frames.view(-1, self.joined_width)


class VoxtralModel(HeardModel):
    text = PartSpec(key="text_config", model_type="llama", fills=VOXTRAL_TEXT, always_fills=True)
    ear_class, ear_type = VoxtralEncoder, "voxtral_encoder"
    returns_features = False

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> dict[str, Module]:
        return {
            "linear_1": Linear(inputs, outputs),
            "act": ActivationModule(tower_activation(config, "projector_hidden_act")),
            "linear_2": Linear(outputs, outputs),
        }


class PickedModel(HeardModel):
    """Padding is left out of what it hears."""

    def collected(self, image_features: Handle) -> Handle:
        """By a mask of each clip's frames."""
        *clips, width = image_features.shape
        rows = picked_rows(self.run, image_features.record, prod(clips))
        return Handle(self.run, rows, (prod(clips), width))


class GlmAsrModel(PickedModel):
    text = PartSpec(key="text_config", model_type="llama", fills=GLM_ASR_TEXT, always_fills=True)
    ear_class, ear_type = GlmAsrEncoder, "glmasr_encoder"

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> dict[str, Module]:
        return {
            "linear_1": Linear(inputs, 2 * outputs, bias=True),
            "act": ActivationModule(tower_activation(config, "projector_hidden_act")),
            "linear_2": Linear(2 * outputs, outputs, bias=True),
        }

    def side_by_side(self, frames: Handle) -> Handle:
        return frames.view(frames.shape[0], -1, self.joined_width)


class Qwen2AudioModel(PickedModel):
    text = QWEN2
    ear_class, ear_type = Qwen2AudioEncoder, "qwen2_audio_encoder"
    returns_features = False

    def projector(self, config: ConfigReader, inputs: int, outputs: int) -> dict[str, Module]:
        del config, inputs
        return {"linear": Linear(self.audio_tower.embed_positions.width, outputs, bias=True)}

    def side_by_side(self, frames: Handle) -> Handle:
        """Each is one."""
        return frames

    def told(self, model: ModelSpec, task: TaskKind | None) -> ModelSpec:
        """Its loss is that of tokens that attention sees."""
        del task
        return replace(model, head=replace(model.head, attended_loss=True))
