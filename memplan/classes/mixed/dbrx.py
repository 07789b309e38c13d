"""DBRX: its experts' matrices lie in one, and run one after another (transformers 5.23, models/dbrx)."""

from collections.abc import Callable

from memplan.classes.llama import (
    DecoderLayer,
    HeadAttention,
    LayerKind,
)
from memplan.classes.mixed.experts import (
    Experts,
    chosen_mask,
    rows_of,
)
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    MixtureModel,
)
from memplan.classes.mixed.routers import Router
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import (
    ActivationModule,
    LayerNorm,
    Linear,
    Norm,
    dropout,
)
from memplan.graph.modules.functional import (
    add_rows,
    divide,
    index,
    jittered,
    part_of,
    product,
    root_of_squares,
    softmax,
    topk,
    zeros,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import (
    Tables,
    apply_rotary,
    turn_function,
)
from memplan.model.attention import Projection
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole


class DbrxAttention(HeadAttention):
    projection = Projection.FUSED_SPLIT
    output = "out_proj"
    turned = True

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        hidden, self.num_heads = (
            config.integer("hidden_size"),
            config.integer("num_attention_heads"),
        )
        self.head_dim = config.divide("d_model", hidden, "n_heads", self.num_heads)
        own = config.child("attn_config", "dbrx.attn_config")
        self.num_kv_heads = own.integer("kv_n_heads")
        config.divide("n_heads", self.num_heads, "kv_n_heads", self.num_kv_heads)
        self.clips = own.raw("clip_qkv") is not None
        self.attention_dropout = own.number("attn_pdrop")
        self.widths = hidden, *(self.num_kv_heads * self.head_dim,) * 2
        self.Wqkv = Linear(hidden, sum(self.widths))
        self.out_proj = Linear(hidden, hidden, role=WeightRole.ATTENTION_OUTPUT)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        qkv_states = self.Wqkv(x)
        if self.clips:
            qkv_states = qkv_states.unary(OperationKind.CLAMP)
        query, key, value = qkv_states.split(*self.widths)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, apply_rotary)(query, key, cos, sin)
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.out_proj(out)
        return out, weights


class DbrxExpertGLU(Module):
    def __init__(self, count: int, active: int, inner: int, hidden: int, kind: Activation) -> None:
        self.num_experts, self.num_active = count, active
        self.w1 = Weight(count * inner, hidden)
        self.v1 = Weight(count * inner, hidden)
        self.w2 = Weight(count * inner, hidden)
        self.activation_fn = ActivationModule(kind)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """All experts' matrices, one below another."""
        share = ExpertShare(self.num_experts, self.num_active)
        return self.run.parameter(name, *weight.shape, module=self.within, experts=share)

    def forward(self, x: Handle, w1: Handle, v1: Handle, w2: Handle) -> Handle:
        gate_proj = product(x, w1)
        up_proj = product(x, v1)
        gate_proj = self.activation_fn(gate_proj)
        intermediate_states = gate_proj * up_proj
        return product(intermediate_states, Handle(self.run, w2.record, (x.shape[-1], w2.shape[0])))


class DbrxExperts(Experts):
    as_modules = False
    in_turn = True

    def __init__(self, config: ConfigReader, hidden: int) -> None:
        self.num_experts = config.integer("moe_num_experts")
        self.num_active = config.integer("moe_top_k")
        self.hidden_dim, self.intermediate_dim = hidden, config.integer("ffn_hidden_size")
        named = config.mapping("ffn_act_fn") or {}
        kind = Activation(str(named.get("name", "silu")))
        self.mlp = DbrxExpertGLU(
            self.num_experts, self.num_active, self.intermediate_dim, hidden, kind
        )

    @property
    def activation_kind(self) -> Activation:
        return self.mlp.activation_fn.kind

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        shape, count = hidden_states.shape, self.num_experts
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        next_states = zeros(hidden_states)
        expert_mask = chosen_mask(top_k_index, count + 1)
        stacks = [self.mlp.operand(each) for each in self.mlp.weights.values()]
        for _ in range(count):
            idx, token_idx = rows_of(expert_mask, top_k_index.numel, count)
            w1, v1, w2 = (part_of(each, count) for each in stacks)
            rows = token_idx.numel
            states = self.mlp(index(hidden_states, token_idx, (rows, shape[-1])), w1, v1, w2)
            states = states * index(top_k_weights, idx, (rows, 1))
            next_states = add_rows(next_states, states.to(next_states.dtype), token_idx)
        next_states = next_states.view(*shape)
        return next_states


class DbrxRouter(Router):
    def __init__(self, config: ConfigReader, hidden: int) -> None:
        self.top_k, self.num_experts = (
            config.integer("moe_top_k"),
            config.integer("moe_num_experts"),
        )
        if self.top_k > self.num_experts:
            error = config.fail("moe_top_k", f"{self.top_k} of {self.num_experts} experts")
            raise error
        self.jitters = config.raw("moe_jitter_eps") is not None
        self.layer = Linear(hidden, self.num_experts, role=WeightRole.ROUTER)

    def forward(self, hidden_states: Handle) -> Handle:
        if self.jitters:
            hidden_states = jittered(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = self.layer(hidden_states)
        return router_logits


class DbrxFFN(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        own, hidden = config.child("ffn_config", "dbrx.ffn_config"), config.integer("hidden_size")
        self.router = DbrxRouter(own, hidden)
        self.experts = DbrxExperts(own, hidden)
        key = "moe_normalize_expert_weights"
        self.normalizes = key not in own.config or own.config[key] is not None

    def route_tokens_to_experts(self, router_logits: Handle) -> tuple[Handle, Handle]:
        router_logits = softmax(router_logits, in_own_dtype=True)
        router_top_value, router_indices = topk(router_logits, self.router.top_k)
        if self.normalizes:
            router_top_value = divide(router_top_value, root_of_squares(router_top_value))
        return router_top_value, router_indices

    def forward(self, hidden_states: Handle) -> Handle:
        router_logits = self.router(hidden_states)
        top_k_weights, top_k_index = self.route_tokens_to_experts(router_logits)
        output = self.experts(hidden_states, top_k_index, top_k_weights)
        return output


class DbrxNormAttentionNorm(Module):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.resid_pdrop = config.number("resid_pdrop")
        self.norm_1 = LayerNorm(hidden, bias=False)
        self.attn = DbrxAttention(config, kind)
        self.norm_2 = LayerNorm(hidden, bias=False)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> tuple[Handle, Handle]:
        residual_states = x
        x = self.norm_1(x).to(x.dtype)
        x, _ = self.attn(x, tables, mask)
        x = dropout(x, self.resid_pdrop)
        x = x + residual_states
        residual_states = x
        x = self.norm_2(x).to(x.dtype)
        return residual_states, x


class DbrxBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.residual_dropout = config.number("resid_pdrop")
        self.norm_attn_norm = DbrxNormAttentionNorm(config, kind)
        self.ffn = DbrxFFN(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        resid_states, x = self.norm_attn_norm(x, tables, mask)
        x = self.ffn(x)
        x = dropout(x, self.residual_dropout)
        x = resid_states + x
        return x


def weight_only_layer_norm(width: int) -> LayerNorm:
    """``nn.LayerNorm(width, bias=False)``."""
    return LayerNorm(width, bias=False)


class DbrxModel(MixtureModel):
    prefix, table, listed, last = "transformer", "wte", "blocks", "norm_f"
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = DbrxBlock
    norm_class: Callable[[int], Norm] = staticmethod(weight_only_layer_norm)
