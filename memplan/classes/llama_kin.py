"""Decoders that differ from Llama in one thing or two.

(transformers 5.23: models/granite, hyperclovax, arcee, jais2, apertus, exaone4, ministral3, helium, seed_oss,
hunyuan_v1_dense, smollm3, cwm)
"""

from collections.abc import Callable, Sequence

from memplan.classes.cohere import turned_in_windows
from memplan.classes.llama import (
    FULL,
    MLP,
    SLIDING,
    BothMasksModel,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    MistralAttention,
    MistralDecoderLayer,
    MistralModel,
    PlainMLP,
    WholeMaskModel,
    check_types,
    layer_windows,
)
from memplan.classes.olmo import OutputNormLayer
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Norm, RMSNorm, dropout
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, Turn, apply_rotary, repeated
from memplan.graph.xielu import xielu
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation
from memplan.model.norms import NormKind


class GraniteDecoderLayer(LlamaDecoderLayer):
    def branch(self, x: Handle) -> Handle:
        return x * 0.22


class GraniteModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = GraniteDecoderLayer

    def embedded(self, batch: int, length: int) -> Handle:
        return super().embedded(batch, length) * 12.0

    def adjusted(self, logits: Handle) -> Handle:
        return logits / 16.0


class HyperCLOVAXDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.use_post_norm = config.flag("use_post_norm")
        super().__init__(config, kind)

    def add_norms(self, hidden: int) -> None:
        super().add_norms(hidden)
        if self.use_post_norm:
            self.placement = NormPlacement.SANDWICH
            self.post_norm1 = self.norm_class(hidden)
            self.post_norm2 = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = self.post_norm1(x) if self.use_post_norm else x
        x = residual + x * 0.22
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = self.post_norm2(x) if self.use_post_norm else x
        x = residual + x * 0.22
        return x


class HyperCLOVAXModel(GraniteModel):
    layer_class: type[LlamaDecoderLayer] = HyperCLOVAXDecoderLayer


class ArceeDecoderLayer(LlamaDecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = PlainMLP


class ArceeModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = ArceeDecoderLayer


class Jais2DecoderLayer(ArceeDecoderLayer):
    norm_class: Callable[[int], Norm] = LayerNorm


class Jais2Model(ArceeModel):
    layer_class: type[LlamaDecoderLayer] = Jais2DecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm


class HeadNormAttention(LlamaAttention):
    """Heads of queries and keys are normed once all are there."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def projected(self, x: Handle) -> Heads:
        query, key, value = super().projected(x)
        query = self.q_norm(query)
        key = self.k_norm(key)
        return query, key, value


class XIELU(ActivationModule):
    """``XIELUActivation._xielu_python``: two parabolas and an exponential, with two trained numbers."""

    def __init__(self, kind: Activation) -> None:
        super().__init__(kind)
        self.alpha_p = Weight(1)
        self.alpha_n = Weight(1)

    def forward(self, x: Handle) -> Handle:
        numbers = self.parameter(self.alpha_p), self.parameter(self.alpha_n)
        return x.like(xielu(x.run, x.record, *numbers))


class ApertusMLP(PlainMLP):
    def bias(self, config: ConfigReader) -> bool:  # noqa: ARG002
        return False

    def activation(self, config: ConfigReader) -> Module:
        kind = read_activation(config, "hidden_act")
        return XIELU(kind) if kind is Activation.XIELU else ActivationModule(kind)


class ApertusDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = HeadNormAttention
    mlp_class: Callable[[ConfigReader], MLP] = ApertusMLP

    def add_norms(self, hidden: int) -> None:
        self.attention_layernorm = self.norm_class(hidden)
        self.feedforward_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.attention_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x
        residual = x
        x = self.feedforward_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class ApertusModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = ApertusDecoderLayer


class Exaone4Attention(HeadNormAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False


class Exaone4DecoderLayer(OutputNormLayer):
    attention_class: type[LlamaAttention] = Exaone4Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class Exaone4Model(WholeMaskModel):
    layer_class: type[LlamaDecoderLayer] = Exaone4DecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return turned_in_windows(config, 4)


class Ministral3Attention(MistralAttention):
    def normed_query(self, query: Handle) -> Handle:
        return by_position(query)


def by_position(query: Handle) -> Handle:
    """Times one factor for each position, the same for all heads (``get_llama_4_attn_scale``)."""
    shape = 1, 1, query.shape[2], 1
    factors = made_by(query.run, OperationKind.POSITION_FACTORS, shape, query.dtype)
    return query * factors


class Ministral3DecoderLayer(MistralDecoderLayer):
    attention_class: type[LlamaAttention] = Ministral3Attention


class Ministral3Model(MistralModel):
    layer_class: type[LlamaDecoderLayer] = Ministral3DecoderLayer


class HeliumRMSNorm(RMSNorm):
    kind = NormKind.RMS_UPCAST

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        return (self.operand(self.weight).float() * x).to(dtype)


def apply_rotary_helium(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """By tables that are repeated in each layer."""
    cos = repeated(cos)
    sin = repeated(sin)
    return apply_rotary(query, key, cos, sin)


class HeliumAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_helium)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), False

    def add_projections(self, config: ConfigReader) -> None:
        super().add_projections(config)
        hidden, width = config.integer("hidden_size"), self.q_proj.out_features
        if width != hidden:
            made = f"{width // self.head_dim} heads of {self.head_dim} make {width}"
            error = config.fail("head_dim", f"{made}, not the hidden_size {hidden}")
            raise error


class HeliumDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = HeliumAttention
    norm_class: Callable[[int], Norm] = HeliumRMSNorm


class HeliumModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = HeliumDecoderLayer
    norm_class: Callable[[int], Norm] = HeliumRMSNorm


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
        down_proj = self.down_proj(self.gated(x))
        down_proj = dropout(down_proj, self.residual_dropout)
        return down_proj


class SeedOssDecoderLayer(LlamaDecoderLayer):
    attention_class = SeedOssAttention
    mlp_class: Callable[[ConfigReader], MLP] = SeedOssMLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.residual_dropout = config.number("resid_pdrop", "residual_dropout")


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


class SmolLM3Model(WholeMaskModel):
    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        count, window = (
            config.layers("num_hidden_layers"),
            config.optional_integer("sliding_window"),
        )
        turned = self.turned(config, count)
        if window is None or not config.flag("use_sliding_window"):
            return [LayerKind(None, each) for each in turned]
        types = config.texts("layer_types") or [FULL if each else SLIDING for each in turned]
        check_types(config, types, count)
        return [
            LayerKind(window if types[number] == SLIDING else None, turned[number])
            for number in range(count)
        ]

    def turned(self, config: ConfigReader, count: int) -> Sequence[bool]:
        """Which layers turn their heads."""
        listed = config.integers("no_rope_layers")
        interval = config.optional_integer("no_rope_layer_interval")
        if listed and len(listed) < count:
            error = config.fail("no_rope_layers", f"names {len(listed)} layers of {count}")
            raise error
        if listed:
            return [bool(each) for each in listed[:count]]
        return [interval is None or (number + 1) % interval != 0 for number in range(count)]


class CwmModel(BothMasksModel):
    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        if config.texts("layer_types"):
            return list(map(LayerKind, layer_windows(config, window)))
        count = config.layers("num_hidden_layers")
        return [LayerKind(window if at % 4 else None) for at in range(count)]
