"""Gemma, Gemma 2 and Gemma 3: a norm that adds one to its weight, norms around each part, two kinds of layers.

(transformers 5.23: models/gemma, models/gemma2, models/gemma3, models/vaultgemma)
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
    Window,
    layer_windows,
)
from memplan.dtypes import DType
from memplan.graph.modules.attention import Attended, attention_function, capped_attention
from memplan.graph.modules.basic import Embedding, Norm, RMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import two_sided_mask
from memplan.graph.modules.rotary import Tables
from memplan.graph.modules.strides import Shape
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormKind


class GemmaRMSNorm(RMSNorm):
    kind = NormKind.RMS_GEMMA

    def normed(self, x: Handle) -> Handle:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    def forward(self, x: Handle) -> Handle:
        output = self.normed(self.behind_hook(x).float())
        output = output * (1.0 + self.operand(self.weight).float())
        return output.to(x.dtype)


class ScaledEmbedding(Embedding):
    """Its factor is a buffer, of which a copy is made where the table has another format."""

    factor_dtype: DType | None = None
    """None: the weights' own."""

    def forward(self, shape: Shape, ids: Handle | None = None) -> Handle:
        run, made = self.run, super().forward(shape, ids)
        if run.decomposed:
            return made * 32.0
        factor = run.buffer(1, self.factor_dtype or run.options.weights)
        return made * Handle(run, factor, (1,)).to(made.dtype)


class GemmaDecoderLayer(LlamaDecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP
    norm_class: Callable[[int], Norm] = GemmaRMSNorm


class GemmaModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = GemmaDecoderLayer
    norm_class: Callable[[int], Norm] = GemmaRMSNorm
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
    placement = NormPlacement.SANDWICH

    def add_norms(self, hidden: int) -> None:
        super().add_norms(hidden)
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


class Gemma2Model(BothMasksModel, GemmaModel):
    eager_only = True
    layer_class: type[LlamaDecoderLayer] = Gemma2DecoderLayer
    window_pattern = 2

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.final_softcap = bool(config.raw("final_logit_softcapping"))

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        return list(map(LayerKind, layer_windows(config, window, self.window_pattern)))

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

    def projected(self, x: Handle) -> Heads:
        query, key, value = super().projected(x)
        query = self.q_norm(query)
        key = self.k_norm(key)
        return query, key, value


class Gemma3DecoderLayer(SandwichLayer):
    attention_class: type[LlamaAttention] = Gemma3Attention


class Gemma3TextModel(LocalTablesModel, Gemma2Model):
    eager_only = False
    layer_class: type[LlamaDecoderLayer] = Gemma3DecoderLayer
    window_pattern = 6

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.two_sided = config.flag("use_bidirectional_attention")

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        if not self.two_sided:
            return super().masks(batch, length)
        run = self.run
        return {each: two_sided_mask(run, batch, length, window=each) for each in self.masked}


class VaultGemmaDecoderLayer(GemmaDecoderLayer):
    second = "pre_feedforward_layernorm"
    attention_class: type[LlamaAttention] = Gemma2Attention

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = self.norm_class(hidden)
        self.pre_feedforward_layernorm = self.norm_class(hidden)


class VaultGemmaModel(Gemma2Model):
    layer_class: type[LlamaDecoderLayer] = VaultGemmaDecoderLayer
