"""OLMo, OLMo 2 and OLMo 3: tables in fp32; norms without weights, then norms on outputs alone.

(transformers 5.23: models/olmo, models/olmo2, models/olmo3)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    BothMasksModel,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    LocalTablesModel,
    RowsAttention,
    clamped_rows,
    layer_windows,
)
from memplan.dtypes import DType
from memplan.graph.modules.basic import Norm, UpcastRMSNorm, layer_norm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, Turn, apply_rotary
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormKind


class OlmoLayerNorm(Norm):
    kind = NormKind.LAYER_PLAIN

    def __init__(self, hidden: int) -> None:
        self.normalized_shape = hidden

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        return layer_norm(x.to(DType.FP32), self.normalized_shape).to(dtype)


class OlmoRotaryEmbedding(RotaryEmbedding):
    def cast(self, table: Handle, x: Handle) -> Handle:  # noqa: ARG002  (they stay in fp32)
        return table


def apply_rotary_in_fp32(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """By tables in fp32, and cast back."""
    query_type, key_type = query.dtype, key.dtype
    query, key = apply_rotary(query, key, cos, sin)
    return query.to(query_type), key.to(key_type)


class OlmoAttention(RowsAttention):
    turn: Turn = staticmethod(apply_rotary_in_fp32)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.clip_qkv = config.raw("clip_qkv") is not None

    def rows(self, x: Handle) -> Heads:
        made = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return clamped_rows(*made) if self.clip_qkv else made


class OlmoDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = OlmoAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP
    norm_class: Callable[[int], Norm] = OlmoLayerNorm


class OlmoModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = OlmoDecoderLayer
    norm_class: Callable[[int], Norm] = OlmoLayerNorm
    rotary_class = OlmoRotaryEmbedding


class Olmo2Attention(RowsAttention):
    turn: Turn = staticmethod(apply_rotary_in_fp32)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = UpcastRMSNorm(self.q_proj.out_features)
        self.k_norm = UpcastRMSNorm(self.k_proj.out_features)


class OutputNormLayer(LlamaDecoderLayer):
    """Norms on what attention and network give, before each sum."""

    placement = NormPlacement.OUTPUT

    def add_norms(self, hidden: int) -> None:
        self.post_attention_layernorm = self.norm_class(hidden)
        self.post_feedforward_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x, _ = self.self_attn(x, tables, mask)
        x = self.post_attention_layernorm(x)
        x = residual + x
        residual = x
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        x = residual + x
        return x


class Olmo2DecoderLayer(OutputNormLayer):
    attention_class: type[LlamaAttention] = Olmo2Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP
    norm_class: Callable[[int], Norm] = UpcastRMSNorm


class Olmo2Model(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = Olmo2DecoderLayer
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    rotary_class = OlmoRotaryEmbedding


class Olmo3Model(LocalTablesModel, BothMasksModel, Olmo2Model):
    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        return list(map(LayerKind, layer_windows(config, window, pattern=4)))
