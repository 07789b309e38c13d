"""Cohere and Cohere 2: attention and network side by side behind one layer norm, heads turned in fp32.

(transformers 5.23: models/cohere, models/cohere2)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    BothMasksModel,
    GatedMLP,
    HeadsFirstAttention,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    layer_windows,
)
from memplan.graph.modules.basic import Norm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import Tables, Turn, rotate_half
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormKind


class CohereLayerNorm(Norm):
    kind = NormKind.LAYER_UPCAST

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        mean = x.mean()
        variance = (x - mean).pow(2).mean()
        x = (x - mean) * (variance + 1e-5).rsqrt()
        x = self.operand(self.weight).float() * x
        return x.to(dtype)


def apply_rotary_upcast(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """In fp32, and cast back."""
    dtype = query.dtype
    query = query.float()
    key = key.float()
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned_query = (query * cos) + (rotate_half(query) * sin)
    turned_key = (key * cos) + (rotate_half(key) * sin)
    return turned_query.to(dtype), turned_key.to(dtype)


class CohereAttention(HeadsFirstAttention):
    turn: Turn = staticmethod(apply_rotary_upcast)

    def add_norms(self) -> None:
        width = self.head_dim
        self.q_norm = CohereLayerNorm(self.q_proj.out_features // width, width)
        self.k_norm = CohereLayerNorm(self.k_proj.out_features // width, width)


class CohereDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = CohereAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP
    norm_class: Callable[[int], Norm] = CohereLayerNorm
    placement = NormPlacement.PARALLEL_SHARED

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        attended, _ = self.self_attn(x, tables, mask)
        fed = self.mlp(x)
        x = residual + attended + fed
        return x


class CohereModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = CohereDecoderLayer
    norm_class: Callable[[int], Norm] = CohereLayerNorm

    def adjusted(self, logits: Handle) -> Handle:
        return logits * 0.0625


class Cohere2Model(BothMasksModel, CohereModel):
    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return turned_in_windows(config, 4)


def turned_in_windows(config: ConfigReader, pattern: int) -> Sequence[LayerKind]:
    """Layers whose heads know positions where they have a window, unless no layer has one."""
    window = config.optional_integer("sliding_window")
    windows = layer_windows(config, window, pattern)
    return [LayerKind(each, window is None or each is not None) for each in windows]
