"""LFM2: short convolutions between products, and attention in some layers; its mixture.

(transformers 5.23: models/lfm2, models/lfm2_moe)
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
from memplan.classes.mixed.deepseek import corrected
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureModel
from memplan.classes.mixed.routers import Routed, Router
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.hybrids import layer_kinds
from memplan.classes.recurrent.mamba import Mixer
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Linear, RMSNorm, fp32_under_autocast
from memplan.graph.modules.functional import activated, best, divide, gather, linear, topk, total
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
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
    is_given_names = True

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
        self.read_apart(self.conv, called=False)
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


class Lfm2MoeMLP(Lfm2MLP):
    def adjusted_size(self, config: ConfigReader) -> int:
        return config.integer("intermediate_size")


class Lfm2MoeTopKRouter(Router):
    score = RouterScore.SIGMOID

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob")
        self.is_corrected = config.flag("use_expert_bias")

    def forward(self, hidden_states: Handle, expert_bias: Handle | None) -> Routed:
        router_logits = linear(hidden_states, self, self.weight)
        routing_weights = router_logits.unary(OperationKind.SIGMOID)
        if expert_bias is not None:
            scores_for_routing = corrected(routing_weights, expert_bias)
            _, selected_experts = best(scores_for_routing, self.top_k)
            routing_weights = gather(routing_weights, selected_experts).to(router_logits.dtype)
        else:
            routing_weights, selected_experts = topk(routing_weights, self.top_k)
        if self.norm_topk_prob:
            routing_weights = divide(
                routing_weights, total(fp32_under_autocast(routing_weights)) + 1e-6
            )
        routing_weights = routing_weights * 1.0
        return router_logits, routing_weights, selected_experts


class Lfm2MoeSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.experts = Experts(config)
        self.gate = Lfm2MoeTopKRouter(config)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
        expert_bias = self.expert_bias() if self.gate.is_corrected else None
        _, routing_weights, selected_experts = self.gate(hidden_states_reshaped, expert_bias)
        final_hidden_states = self.experts(
            hidden_states_reshaped, selected_experts, routing_weights
        )
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)

    def expert_bias(self) -> Handle:
        """A buffer, in fp32 whatever the model's format is."""
        count = self.gate.num_experts
        return Handle(self.run, self.run.buffer(count, DType.FP32, module=self.within), (count,))


class Lfm2MoeDecoderLayer(Lfm2DecoderLayer):
    mlp_class: Callable[[ConfigReader], MLP] = Lfm2MoeMLP

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:
        return Lfm2MoeSparseMoeBlock(config) if kind.sparse else self.mlp_class(config)


class Lfm2MoeModel(Lfm2Model, MixtureModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = Lfm2MoeDecoderLayer
    adds_router_loss = False

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        dense = config.integer("num_dense_layers", minimum=0)
        return [
            kind._replace(sparse=number >= dense)
            for number, kind in enumerate(super().kinds(config))
        ]


def lfm_types(config: ConfigReader) -> list[str]:
    """What mixes each layer's tokens."""
    named = layer_kinds(config, "layer_types")
    if named:
        return named
    count = config.layers("num_hidden_layers")
    attends = set(config.integers("full_attn_idxs")) or set(range(count))
    return ["full_attention" if number in attends else "conv" for number in range(count)]
