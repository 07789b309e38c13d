"""Decoders that differ from Llama in one thing or two: Granite, Arcee, Seed-OSS, HunYuan, SmolLM3.

(transformers 5.23: models/granite, models/arcee, models/seed_oss, models/hunyuan_v1_dense, models/smollm3)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    SLIDING,
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
)
from memplan.families.llama import read_activation
from memplan.graph.modules.basic import ActivationModule, Linear, RMSNorm, dropout
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader


class GraniteDecoderLayer(LlamaDecoderLayer):
    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x * 0.22
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x * 0.22
        return x


class GraniteModel(LlamaModel):
    layer_class = GraniteDecoderLayer

    def embedded(self, batch: int, length: int) -> Handle:
        return super().embedded(batch, length) * 12.0

    def adjusted(self, logits: Handle) -> Handle:
        return logits / 16.0


class ArceeMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        bias = config.flag("mlp_bias")
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ArceeDecoderLayer(LlamaDecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = ArceeMLP


class ArceeModel(LlamaModel):
    layer_class = ArceeDecoderLayer


class SeedOssAttention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("resid_pdrop", "residual_dropout")

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), config.flag("attention_out_bias")

    def dropped(self, out: Handle) -> Handle:
        return dropout(out, self.residual_dropout)


class SeedOssMLP(LlamaMLP):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.residual_dropout = config.number("resid_pdrop", "residual_dropout")

    def forward(self, x: Handle) -> Handle:
        down_proj = super().forward(x)
        down_proj = dropout(down_proj, self.residual_dropout)
        return down_proj


class SeedOssDecoderLayer(LlamaDecoderLayer):
    attention_class = SeedOssAttention
    mlp_class: Callable[[ConfigReader], MLP] = SeedOssMLP


class SeedOssModel(LlamaModel):
    layer_class = SeedOssDecoderLayer


class HunYuanAttention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.query_layernorm = RMSNorm(self.head_dim)
        self.key_layernorm = RMSNorm(self.head_dim)

    def normed_query(self, query: Handle) -> Handle:
        return self.query_layernorm(query)

    def normed_key(self, key: Handle) -> Handle:
        return self.key_layernorm(key)


class HunYuanDecoderLayer(LlamaDecoderLayer):
    attention_class = HunYuanAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class HunYuanModel(LlamaModel):
    layer_class = HunYuanDecoderLayer


class SmolLM3Model(LlamaModel):
    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        count, window = (
            config.layers("num_hidden_layers"),
            config.optional_integer("sliding_window"),
        )
        listed, interval = (
            config.integers("no_rope_layers"),
            config.optional_integer("no_rope_layer_interval"),
        )
        turned = [bool(each) for each in listed] or [True] * count
        if not listed and interval is not None:
            turned = [(number + 1) % interval != 0 for number in range(count)]
        types = config.texts("layer_types") or [
            "full_attention" if each else SLIDING for each in turned
        ]
        if window is None or not config.flag("use_sliding_window"):
            return [LayerKind(None, each) for each in turned[:count]]
        return [
            LayerKind(window if types[number] == SLIDING else None, turned[number])
            for number in range(count)
        ]
