"""GLM, GLM-4 and Phi-3: a part of each head is turned, gate and up are one matrix.

(transformers 5.23: models/glm, models/glm4, models/phi3)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    GateUpMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    layer_windows,
    rotated_width,
)
from memplan.graph.modules.basic import Dropout, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import (
    Tables,
    Turn,
    apply_rotary_to_part,
    concatenate,
    cut,
    repeated,
    rotate_half,
)
from memplan.model.attention import Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.parameters import WeightRole


def apply_rotary_glm(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """By tables that are repeated in each layer."""
    cos = repeated(cos)
    sin = repeated(sin)
    return apply_rotary_to_part(query, key, cos, sin)


class GlmAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_glm)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), False


class GlmDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = GlmAttention
    mlp_class: Callable[[ConfigReader], MLP] = GateUpMLP


class GlmModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = GlmDecoderLayer

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 0.5)


class Glm4DecoderLayer(GlmDecoderLayer):
    placement = NormPlacement.SANDWICH

    def add_norms(self, hidden: int) -> None:
        super().add_norms(hidden)
        self.post_self_attn_layernorm = self.norm_class(hidden)
        self.post_mlp_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = self.post_self_attn_layernorm(x)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = self.post_mlp_layernorm(x)
        x = residual + x
        return x


class Glm4Model(GlmModel):
    layer_class: type[LlamaDecoderLayer] = Glm4DecoderLayer


def apply_rotary_phi3(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Queries are joined before keys are turned."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turning, rest = cut(query, cos)
    turning_key, rest_key = cut(key, cos)
    made = concatenate((turning * cos) + (rotate_half(turning) * sin), rest)
    made_key = concatenate((turning_key * cos) + (rotate_half(turning_key) * sin), rest_key)
    return made, made_key


class Phi3Attention(LlamaAttention):
    projection = Projection.FUSED_SLICED
    turn: Turn = staticmethod(apply_rotary_phi3)

    def add_projections(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.query_width = self.num_heads * self.head_dim
        self.key_width = self.num_kv_heads * self.head_dim
        role = WeightRole.ATTENTION_OUTPUT
        self.o_proj = Linear(self.query_width, hidden, role=role)
        self.qkv_proj = Linear(hidden, self.query_width + 2 * self.key_width)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x)
        query = qkv.narrow(self.query_width)
        key = qkv.narrow(self.key_width)
        value = qkv.narrow(self.key_width)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class Phi3DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Phi3Attention
    mlp_class: Callable[[ConfigReader], MLP] = GateUpMLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("resid_pdrop")
        self.resid_attn_dropout = Dropout(self.residual_dropout)
        self.resid_mlp_dropout = Dropout(self.residual_dropout)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + self.resid_attn_dropout(x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + self.resid_mlp_dropout(x)
        return x


class Phi3Model(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = Phi3DecoderLayer

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config, 1.0)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        return list(map(LayerKind, layer_windows(config, window)))
