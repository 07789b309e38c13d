"""Llama 4's text: some layers know no positions, and experts that all multiply every token.

(transformers 5.23, models/llama4/modeling_llama4.py)
"""

from collections.abc import Sequence

from memplan.classes.llama import (
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    Network,
    Window,
)
from memplan.classes.mixed.latent import ComplexRotaryEmbedding
from memplan.classes.mixed.mixtures import SharedExpert
from memplan.classes.mixed.routers import LinearRouter
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.attention import Attended, attention_function, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, Norm, RMSNorm
from memplan.graph.modules.functional import (
    add_in_place,
    as_real,
    batched_product,
    linear,
    repeated,
    scatter_into,
    sum_of_stretches,
    topk,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import causal_mask, counted_positions
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, Turn, turn_function
from memplan.graph.operations.rotary import times_complex
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec, RouterScore, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock
from memplan.training.choices_of_kernels.kernels import AttentionKernel


class Llama4TextL2Norm(Module):
    def normed(self, x: Handle) -> Handle:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    def forward(self, x: Handle) -> Handle:
        return self.normed(x.float()).to(x.dtype)


class Llama4TextRMSNorm(RMSNorm):
    def normed(self, x: Handle) -> Handle:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    def forward(self, x: Handle) -> Handle:
        output = self.normed(x.float()).to(x.dtype)
        return output * self.operand(self.weight)


def apply_rotary_emb(xq: Handle, xk: Handle, freqs_cis: Handle, _: Handle) -> Tables:
    """Pairs of fp32 copies as complex numbers; both products are there before the first is cast back."""
    xq_ = xq.float()
    xk_ = xk.float()
    freqs_cis = freqs_cis.unsqueeze(2)
    xq_out = as_real(turned_by(xq_, freqs_cis))
    xk_out = as_real(turned_by(xk_, freqs_cis))
    return xq_out.to(xq.dtype), xk_out.to(xk.dtype)


def turned_by(x: Handle, freqs_cis: Handle) -> Handle:
    """``x * freqs_cis`` of complex numbers."""
    return x.like(times_complex(x.run, x.record, freqs_cis.record))


class Llama4TextAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_emb)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.attn_temperature_tuning = config.flag("attn_temperature_tuning")
        if config.flag("use_qk_norm") and self.turned:
            self.qk_norm = Llama4TextL2Norm()

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query_states = self.q_proj(x).view(batch, length, -1, self.head_dim)
        key_states = self.k_proj(x).view(batch, length, -1, self.head_dim)
        value_states = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        if self.turned:
            turn = turn_function(self.run.kernels.rotary, self.turn)
            query_states, key_states = turn(query_states, key_states, *tables)
        if "qk_norm" in self.children:
            query_states = self.qk_norm(query_states)
            key_states = self.qk_norm(key_states)
        if self.attn_temperature_tuning and not self.turned:
            positions = counted_positions(self.run, length).apart(OperationKind.ADD_SCALAR)
            attn_scales = position_factors(positions)
            query_states = (query_states * attn_scales).to(query_states.dtype)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        attend = attention_function(self.run, unwidened_attention)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights


def position_factors(positions: Handle) -> Handle:
    """``log1p(floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0``, one for each token."""
    shape = 1, positions.numel, 1, 1
    return made_by(positions.run, OperationKind.POSITION_FACTORS, shape, DType.FP32)


class Llama4TextMLP(GatedMLP):
    """A network beside no experts, of a width of its own."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config, config.integer("intermediate_size_mlp"))


class Llama4TextExperts(Module):
    block = LayerBlock.EXPERTS

    def __init__(self, config: ConfigReader) -> None:
        self.num_experts = config.integer("num_local_experts")
        self.num_active = config.integer("num_experts_per_tok")
        self.hidden_size = config.integer("hidden_size")
        self.expert_dim = config.integer("intermediate_size")
        self.gate_up_proj = Weight(self.num_experts, self.hidden_size, 2 * self.expert_dim)
        self.down_proj = Weight(self.num_experts, self.expert_dim, self.hidden_size)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A stack, of which each token multiplies some matrices by more than 0."""
        joined = 2 if weight is self.gate_up_proj else 1
        share = ExpertShare(self.num_experts, self.num_active, joined)
        return self.run.parameter(name, *weight.shape, module=self.within, experts=share)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = hidden_states.view(self.num_experts, -1, self.hidden_size)
        gate_up = batched_product(hidden_states, self.operand(self.gate_up_proj))
        gate, up = gate_up.split(self.expert_dim, self.expert_dim)
        next_states = batched_product(up * self.act_fn(gate), self.operand(self.down_proj))
        next_states = next_states.view(-1, self.hidden_size)
        return next_states


class Llama4Router(LinearRouter):
    """Of its logits the largest ones' sigmoids are taken, and zeros for the others."""

    score = RouterScore.SIGMOID
    count_keys = ("num_local_experts",)

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        router_logits = linear(hidden_states, self, self.weight)
        router_top_value, router_indices = topk(router_logits, self.top_k)
        router_scores = scatter_into(router_top_value, router_indices, router_logits.shape)
        router_scores = router_scores.float().unary(OperationKind.SIGMOID).to(router_scores.dtype)
        return router_scores, router_logits


class Llama4TextMoe(Network):
    def __init__(self, config: ConfigReader) -> None:
        self.hidden_dim = config.integer("hidden_size")
        self.experts = Llama4TextExperts(config)
        self.router = Llama4Router(config)
        self.shared_expert = SharedExpert(config)

    def facts(self) -> MixtureSpec:
        shared = self.shared_expert.facts()
        return MixtureSpec(
            num_experts=self.router.num_experts, num_experts_per_token=self.router.top_k,
            expert=FeedForwardSpec(
                intermediate_size=self.experts.expert_dim, activation=shared.activation, gated=True,
            ),
            router=RouterSpec(score=self.router.score), shared=shared, in_own_way=True,
        )  # fmt: skip

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        hidden_states = hidden_states.seen_as(-1, self.hidden_dim)
        router_scores, router_logits = self.router(hidden_states)
        routed_in = repeated(hidden_states, self.router.num_experts)
        routed_in = routed_in * router_scores.transpose(0, 1).reshape(-1, 1)
        routed_out = self.experts(routed_in)
        out = self.shared_expert(hidden_states)
        out = add_in_place(out, sum_of_stretches(routed_out, self.router.num_experts))
        return out, router_logits


class Llama4TextDecoderLayer(LlamaDecoderLayer):
    attention_class = Llama4TextAttention
    norm_class = Llama4TextRMSNorm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.self_attn = self.attention_class(config, kind)
        self.is_moe_layer = kind.sparse
        self.feed_forward = Llama4TextMoe(config) if kind.sparse else Llama4TextMLP(config)
        self.add_norms(config.integer("hidden_size"))

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        attention_states, _ = self.self_attn(x, tables, mask)
        x = residual + attention_states
        residual = x
        x = self.post_attention_layernorm(x)
        if self.is_moe_layer:
            x, _ = self.feed_forward(x)
        else:
            x = self.feed_forward(x)
        x = residual + x.view(*residual.shape)
        return x


class Llama4TextModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = Llama4TextDecoderLayer
    norm_class: type[Norm] = Llama4TextRMSNorm
    rotary_class = ComplexRotaryEmbedding
    tied_by_default = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.masked = [None, config.integer("attention_chunk_size")]

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        """With or without positions, and so with or without chunks; with or without experts."""
        count, chunk = config.layers("num_hidden_layers"), config.integer("attention_chunk_size")
        every = config.integer("interleave_moe_layer_step")
        listed = config.raw("moe_layers") is not None
        sparse = set(config.integers("moe_layers") if listed else range(every - 1, count, every))
        period = config.integer("no_rope_layer_interval")
        turned = config.integers("no_rope_layers") or [
            int((number + 1) % period != 0) for number in range(count)
        ]
        if len(turned) < count:
            error = config.fail("no_rope_layers", f"names {len(turned)} layers of {count}")
            raise error
        return [
            LayerKind(chunk if turned[at] else None, bool(turned[at]), at in sparse)
            for at in range(count)
        ]

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        """A chunk's is made for every sequence."""
        run = self.run
        eager = run.kernels.attention is AttentionKernel.EAGER
        return {
            each: causal_mask(
                run, batch, length, window=each,
                blocks=each is not None and (eager or length >= each),
            )
            for each in self.masked
        }  # fmt: skip
