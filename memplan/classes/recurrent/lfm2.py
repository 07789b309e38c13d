"""LFM2: short convolutions between products, and attention in some layers.

(transformers 5.23: models/lfm2)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    MLP,
    DecoderLayer,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.hybrids import layer_kinds
from memplan.classes.recurrent.mamba import Mixer
from memplan.graph.modules.basic import Linear, RMSNorm
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation


class Lfm2MLP(GatedMLP):
    activation_kind = Activation.SILU

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        inner = self.adjusted_size(config)
        self.w1 = Linear(hidden, inner)
        self.w3 = Linear(hidden, inner)
        self.w2 = Linear(inner, hidden)

    def adjusted_size(self, config: ConfigReader) -> int:
        """Two thirds of the size asked for, scaled, rounded up."""
        size = config.integer("block_ff_dim", "intermediate_size")
        if not config.flag("block_auto_adjust_ff_dim"):
            return size
        size = int(2 * size / 3)
        if config.raw("block_ffn_dim_multiplier") is None:
            return size
        size = int(config.number("block_ffn_dim_multiplier", maximum=1e6) * size)
        multiple = config.integer("block_multiple_of")
        return -(-size // multiple) * multiple

    @property
    def last(self) -> Linear:
        return self.w2

    def forward(self, x: Handle) -> Handle:
        return self.w2(activated(self.w1(x), Activation.SILU) * self.w3(x))


class Lfm2Attention(LlamaAttention):
    output = "out_proj"

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.attention_dropout = 0.0
        self.q_layernorm = RMSNorm(self.head_dim)
        self.k_layernorm = RMSNorm(self.head_dim)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_layernorm(self.q_proj(x).view(batch, length, -1, self.head_dim))
        query = query.transpose(1, 2)
        key = self.k_layernorm(self.k_proj(x).view(batch, length, -1, self.head_dim))
        key = key.transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class Lfm2ShortConv(Mixer):
    def __init__(self, config: ConfigReader) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("conv_bias")
        self.conv = CausalConv1d(hidden, config.integer("conv_L_cache"), bias=bias)
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias)
        self.out_proj = Linear(hidden, hidden, bias=bias)

    def forward(self, x: Handle) -> Handle:
        width = x.shape[-1]
        projected = self.in_proj(x).transpose(-1, -2)
        before, after, x = projected.split(width, width, width, dim=-2)
        x = before * x
        x = self.conv(x)
        y = after * x
        y = y.transpose(-1, -2).contiguous()
        y = self.out_proj(y)
        return y


class Lfm2DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Lfm2Attention
    mlp_class: Callable[[ConfigReader], MLP] = Lfm2MLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.attends = kind.attends
        if kind.attends:
            self.self_attn = self.attention_class(config, kind)
        else:
            self.conv = Lfm2ShortConv(config)
        self.feed_forward = self.network(config, kind)
        self.operator_norm = RMSNorm(hidden)
        self.ffn_norm = RMSNorm(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        if self.attends:
            x, _ = self.self_attn(self.operator_norm(x), tables, mask)
        else:
            x = self.conv(self.operator_norm(x))
        x = x + residual
        x = x + self.feed_forward(self.ffn_norm(x))
        return x


class Lfm2Model(LlamaModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = Lfm2DecoderLayer
    last = "embedding_norm"

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [LayerKind(attends=each == "full_attention") for each in lfm_types(config)]

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        """An older key comes first."""
        own = "tie_embedding" in config.config and config.raw("tie_embedding") is not None
        return config.flag("tie_embedding") if own else tied


def lfm_types(config: ConfigReader) -> list[str]:
    """What mixes each layer's tokens."""
    named = layer_kinds(config, "layer_types")
    if named:
        return named
    count = config.layers("num_hidden_layers")
    attends = set(config.integers("full_attn_idxs")) or set(range(count))
    return ["full_attention" if number in attends else "conv" for number in range(count)]
