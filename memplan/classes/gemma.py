"""Gemma, Gemma 2 and Gemma 3: a norm that adds one to its weight, norms around each part, two kinds of layers.

(transformers 5.23: models/gemma, models/gemma2, models/gemma3, models/vaultgemma)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    SLIDING,
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)
from memplan.graph.modules.attention import Attended, attention_function, capped_attention
from memplan.graph.modules.basic import Embedding, RMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.rotary import Tables
from memplan.graph.modules.strides import Shape
from memplan.model.config import ConfigReader


class GemmaRMSNorm(RMSNorm):
    def normed(self, x: Handle) -> Handle:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    def forward(self, x: Handle) -> Handle:
        output = self.normed(x.float())
        output = output * (1.0 + self.operand(self.weight).float())
        return output.to(x.dtype)


class ScaledEmbedding(Embedding):
    def forward(self, shape: Shape, ids: Handle | None = None) -> Handle:
        return super().forward(shape, ids) * 32.0


class GemmaDecoderLayer(LlamaDecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP
    norm_class = GemmaRMSNorm


class GemmaModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = GemmaDecoderLayer
    norm_class = GemmaRMSNorm
    embedding_class = ScaledEmbedding


class Gemma2Attention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.softcap = bool(config.raw("attn_logit_softcapping"))

    def attend(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        kernels = self.run.kernels
        if self.softcap and not (kernels.attention.is_package or kernels.fused_elementwise):
            return capped_attention(query, key, value, mask, probability)
        return attention_function(self.run)(query, key, value, mask, probability)


class SandwichLayer(GemmaDecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        hidden = config.integer("hidden_size")
        self.pre_feedforward_layernorm = self.norm_class(hidden)
        self.post_feedforward_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = self.post_attention_layernorm(x)
        x = residual + x
        residual = x
        x = self.pre_feedforward_layernorm(x)
        x = self.mlp(x)
        x = self.post_feedforward_layernorm(x)
        x = residual + x
        return x


class Gemma2DecoderLayer(SandwichLayer):
    attention_class: type[LlamaAttention] = Gemma2Attention


class Gemma2Model(GemmaModel):
    layer_class: type[LlamaDecoderLayer] = Gemma2DecoderLayer
    window_pattern = 2

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.final_softcap = bool(config.raw("final_logit_softcapping"))

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        count, window = (
            config.layers("num_hidden_layers"),
            config.optional_integer("sliding_window"),
        )
        types, pattern = config.texts("layer_types"), self.window_pattern
        if window is None:
            return [LayerKind()] * count
        if types:
            return [LayerKind(window if types[at] == SLIDING else None) for at in range(count)]
        keys = "sliding_window_pattern", "_sliding_window_pattern"
        period = config.integer(*keys, default=pattern)
        return [LayerKind(window if (at + 1) % period else None) for at in range(count)]

    def adjusted(self, logits: Handle) -> Handle:
        if self.final_softcap:
            logits = logits / 30.0
            logits = logits.tanh()
            logits = logits * 30.0
        return logits


class Gemma3Attention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = GemmaRMSNorm(self.head_dim)
        self.k_norm = GemmaRMSNorm(self.head_dim)

    def split_query(self, query: Handle) -> Handle:
        return self.q_norm(query)

    def split_key(self, key: Handle) -> Handle:
        return self.k_norm(key)


class Gemma3DecoderLayer(SandwichLayer):
    attention_class: type[LlamaAttention] = Gemma3Attention


class Gemma3TextModel(Gemma2Model):
    layer_class: type[LlamaDecoderLayer] = Gemma3DecoderLayer
    window_pattern = 6

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        windows = sorted({kind.window for kind in self.layers.kinds}, key=bool)
        masks = self.masks(batch, length)
        x = embeds
        tables = {each: self.rotary_emb(x, positions) for each in windows}
        for layer in self.layers:
            window = layer.kind.window
            x = layer(x, tables[window], masks[window])
        x = self.norm(x)
        return x
