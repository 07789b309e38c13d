"""Mixtures around attention whose output is gated: AFMoE and Laguna.

(transformers 5.23: models/afmoe, models/laguna)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    BothMasksModel,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LocalTablesModel,
    Window,
)
from memplan.classes.mixed.deepseek import corrected
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    MixtureLayer,
    MixtureModel,
    SharedExpert,
    typed_sparse,
    typed_window,
)
from memplan.classes.mixed.routers import Routed, Router
from memplan.classes.mixed.sinks import typed_rotary
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Linear, Norm, RMSNorm, UpcastRMSNorm
from memplan.graph.modules.functional import best, divide, gather, linear, total
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Weight
from memplan.graph.modules.rotary import Tables, Turn, apply_rotary_to_part, turn_function
from memplan.model.attention import OutputGate
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.mixtures import RouterScore
from memplan.model.parameters import WeightRole


class AfmoeTokenChoiceRouter(Router):
    score = RouterScore.SIGMOID
    is_corrected = returns_fp32 = True

    def add_matrix(self, hidden: int) -> None:
        self.gate = Linear(hidden, self.num_experts, role=WeightRole.ROUTER)

    def forward(self, hidden_states: Handle, expert_bias: Handle) -> Routed:
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = self.gate(hidden_states).float()
        scores = router_logits.unary(OperationKind.SIGMOID)
        _, selected_experts = best(corrected(scores, expert_bias), self.top_k)
        top_scores = gather(scores, selected_experts)
        denominator = total(top_scores) + 1e-20
        top_scores = divide(top_scores, denominator)
        top_scores = top_scores * 1.0
        return router_logits, top_scores, selected_experts


class AfmoeSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = AfmoeTokenChoiceRouter(config)
        inner = config.integer("moe_intermediate_size")
        count = config.integer("num_shared_experts", minimum=1)
        self.shared_experts = SharedExpert(config, inner * count)
        self.experts = Experts(config)
        self.expert_bias = Weight(self.router.num_experts, trainable=False)

    def forward(self, hidden_states: Handle) -> Handle:
        shape = hidden_states.shape
        hidden_states_flat = hidden_states.view(-1, shape[-1])
        _, top_scores, selected_experts = self.router(hidden_states, self.operand(self.expert_bias))
        shared_output = self.shared_experts(hidden_states_flat).view(*shape)
        routed_output = self.experts(hidden_states_flat, selected_experts, top_scores).view(*shape)
        return shared_output + routed_output


class AfmoeAttention(LlamaAttention):
    output_gate = OutputGate.SIGMOID

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = UpcastRMSNorm(self.head_dim)
        self.k_norm = UpcastRMSNorm(self.head_dim)
        width = self.num_heads * self.head_dim
        self.gate_proj = Linear(config.integer("hidden_size"), width)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim)
        gate_states = self.gate_proj(x)
        query = self.q_norm(query).transpose(1, 2)
        key = self.k_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        if self.turned:
            cos, sin = tables
            query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        output, weights = self.attend(query, key, value, mask, self.attention_dropout)
        output = output.view(batch, length, -1)
        output = output * gate_states.unary(OperationKind.SIGMOID)
        attn_output = self.project_out(output)
        return attn_output, weights


class AfmoeDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = AfmoeAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = AfmoeSparseMoeBlock
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    placement = NormPlacement.SANDWICH

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = self.attention_class(config, kind)
        self.input_layernorm = self.norm_class(hidden)
        self.post_attention_layernorm = self.norm_class(hidden)
        self.pre_mlp_layernorm = self.norm_class(hidden)
        self.post_mlp_layernorm = self.norm_class(hidden)
        self.mlp = self.network(config, kind)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = self.post_attention_layernorm(x)
        x = residual + x
        residual = x
        x = self.pre_mlp_layernorm(x)
        x = self.mlp(x)
        x = self.post_mlp_layernorm(x)
        x = residual + x
        return x


class AfmoeModel(BothMasksModel, MixtureModel):
    layer_class: type[LlamaDecoderLayer] = AfmoeDecoderLayer
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    adds_router_loss = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.mup_enabled = config.flag("mup_enabled")

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [each._replace(turned=each.window is not None) for each in super().kinds(config)]

    def window(self, config: ConfigReader, number: int) -> Window:
        every = config.integer("global_attn_every_n_layers", default=4)
        return typed_window(config, number, local=(number + 1) % every != 0)

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return number >= config.integer("num_dense_layers", default=0, minimum=0)

    def entered(self, embeds: Handle) -> Handle:
        return embeds * 1.0 if self.mup_enabled else embeds


class LagunaTopKRouter(Router):
    score = RouterScore.SIGMOID
    is_corrected = returns_fp32 = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.e_score_correction_bias = Weight(self.num_experts, trainable=False)
        self.is_capped = config.number("moe_router_logit_softcapping", maximum=MAX_SOFTCAP) > 0

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        router_logits = linear(hidden_states, self, self.weight).float()
        if self.is_capped:
            router_logits = (router_logits / 1.0).tanh() * 1.0
        routing_scores = router_logits.unary(OperationKind.SIGMOID)
        scores_for_selection = corrected(routing_scores, self.operand(self.e_score_correction_bias))
        _, selected_experts = best(scores_for_selection, self.top_k)
        routing_weights = gather(routing_scores, selected_experts)
        routing_weights = divide(routing_weights, total(routing_weights))
        routing_weights = routing_weights.to(hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


MAX_SOFTCAP = 1e9
"""No cap on logits is larger."""


class LagunaSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.experts = Experts(config)
        self.gate = LagunaTopKRouter(config)
        inner = config.integer("shared_expert_intermediate_size")
        self.shared_experts = SharedExpert(config, inner)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        shared_output = self.shared_experts(hidden_states)
        _, routing_weights, selected_experts = self.gate(hidden_states)
        hidden_states = self.experts(hidden_states, selected_experts, routing_weights)
        hidden_states = hidden_states * 1.0
        hidden_states = hidden_states + shared_output
        hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return hidden_states


class LagunaAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)
    output_gate = OutputGate.SOFTPLUS

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.own_heads = kind.heads
        super().__init__(config, kind)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)
        gating = config.raw("gating")
        self.gate_per_head = gating is True or gating == "per-head"
        if self.gate_per_head:
            self.output_gate = OutputGate.SOFTPLUS_PER_HEAD
        width = self.num_heads * (1 if self.gate_per_head else self.head_dim)
        self.g_proj = Linear(config.integer("hidden_size"), width)

    def add_projections(self, config: ConfigReader) -> None:
        if self.own_heads:
            self.num_heads = self.own_heads
            what = "num_attention_heads_per_layer"
            config.divide(what, self.num_heads, "num_key_value_heads", self.num_kv_heads)
        super().add_projections(config)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim)
        query = self.q_norm(query).transpose(1, 2)
        key = self.k_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        return query, key, value

    def gated(self, out: Handle, x: Handle) -> Handle:
        gate = self.g_proj(x).float().unary(OperationKind.SOFTPLUS).to(out.dtype)
        if not self.gate_per_head:
            return out * gate
        batch, length, width = out.shape
        return (out.view(batch, length, -1, self.head_dim) * gate.unsqueeze(-1)).view(
            batch, length, width
        )


class LagunaDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = LagunaAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = LagunaSparseMoeBlock


class LagunaModel(LocalTablesModel, MixtureModel):
    layer_class: type[LlamaDecoderLayer] = LagunaDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.rotary_emb = typed_rotary(config, (0.5, 1.0))

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        found = super().kinds(config)
        heads = config.integers("num_attention_heads_per_layer", minimum=1)
        if heads and len(heads) < len(found):
            problem = f"names {len(heads)} layers of {len(found)}"
            error = config.fail("num_attention_heads_per_layer", problem)
            raise error
        return [each._replace(heads=own) for each, own in zip(found, heads, strict=False)] or found

    def window(self, config: ConfigReader, number: int) -> Window:
        return typed_window(config, number, local=False)

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return typed_sparse(config, number)
