"""Llama's kin whose attention is another: BitNet, DiffLlama and Doge.

(transformers 5.23: models/bitnet, models/diffllama, models/doge)
"""

from collections.abc import Callable
from math import isqrt

from memplan.classes.llama import (
    MLP,
    GatedMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    Network,
    Qwen3Attention,
    Window,
)
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Embedding, Linear, RMSNorm, dropout
from memplan.graph.modules.functional import (
    added_crosswise,
    batched_product,
    best,
    detached,
    expanded,
    made_from,
    masked_fill,
    repeated,
    softmax,
    summed,
    topk,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate, turn_function
from memplan.graph.operations.norms import norm_weightless
from memplan.model.attention import AttentionForm
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole


class BitNetMLP(GatedMLP):
    def __init__(self, config: ConfigReader, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self.ffn_sub_norm = RMSNorm(self.down_proj.in_features)

    def forward(self, x: Handle) -> Handle:
        return self.down_proj(self.ffn_sub_norm(self.gated(x)))


class BitNetAttention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.attn_sub_norm = RMSNorm(config.integer("hidden_size"))

    def gated(self, out: Handle, x: Handle) -> Handle:  # noqa: ARG002
        return self.attn_sub_norm(out)


class BitNetDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = BitNetAttention
    mlp_class: Callable[[ConfigReader], MLP] = BitNetMLP


class BitNetModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = BitNetDecoderLayer


class DiffLlamaAttention(LlamaAttention):
    """Two attention calls, whose difference is weighted by the products of four vectors."""

    form = AttentionForm.OWN

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.attention_dropout = 0.0
        if self.num_kv_heads % 2:
            problem = f"{self.num_kv_heads} is odd, must be even"
            error = config.fail("num_key_value_heads", problem)
            raise error
        self.lambda_q1 = Weight(self.head_dim)
        self.lambda_k1 = Weight(self.head_dim)
        self.lambda_q2 = Weight(self.head_dim)
        self.lambda_k2 = Weight(self.head_dim)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length = x.shape[:2]
        query, key, value = self.projected(x)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        heads = value.shape[1] // 2
        value1, value2 = (repeated(v, 2, dim=1) for v in value.split(heads, heads, dim=1))
        attend = attention_function(self.run)
        attn_output1, attn_weights = attend(query, key, value1, mask, 0.0)
        attn_output2, _ = attend(query, key, value2, mask, 0.0)
        attn_output = concatenate(attn_output1, attn_output2)
        heads = attn_output.shape[2] // 2
        attn_output1, attn_output2 = attn_output.split(heads, heads, dim=2)
        lambda_1 = self.weighted(self.lambda_q1, self.lambda_k1, query.dtype)
        lambda_2 = self.weighted(self.lambda_q2, self.lambda_k2, query.dtype)
        lambda_full = lambda_1 - lambda_2 + 0.8
        attn_output = attn_output1 - lambda_full * attn_output2
        attn_output = self.groupnorm(attn_output) * 0.2
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.project_out(attn_output)
        return attn_output, attn_weights

    def weighted(self, one: Weight, other: Weight, dtype: DType) -> Handle:
        """The exponential of two vectors' product."""
        return summed(self.operand(one) * self.operand(other)).unary(OperationKind.EXP).to(dtype)

    def groupnorm(self, x: Handle) -> Handle:
        """``nn.RMSNorm(2 * head_dim, elementwise_affine=False)``."""
        return x.like(norm_weightless(self.run, x.record, 2 * self.head_dim))


class DiffLlamaDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = DiffLlamaAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class DiffLlamaModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = DiffLlamaDecoderLayer


class DogeAttention(Qwen3Attention):
    """Its mask depends on the values."""

    form = AttentionForm.OWN

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.keep_window_size = config.integer("keep_window_size")

    def add_projections(self, config: ConfigReader) -> None:
        super().add_projections(config)
        output = self.children.pop("o_proj")
        self.A = Weight(self.num_kv_heads)
        width, bias = self.num_kv_heads * self.head_dim, config.flag("attention_bias")
        self.dt_proj = Linear(width, self.num_kv_heads, bias=bias)
        self.o_proj = output

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        dt_states = self.dt_proj(value.transpose(1, 2).reshape(batch, length, -1))
        dt_states = self.steps(dt_states.unary(OperationKind.SOFTPLUS)).transpose(1, 2)
        attn_mask = self.prepare_dynamic_mask(dt_states, mask)
        attn_mask = attn_mask.repeat_heads(query.shape[1] // key.shape[1])
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, attn_mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights

    def steps(self, curve: Handle) -> Handle:
        """``torch.exp(self.A * curve)``."""
        return (self.operand(self.A) * curve).unary(OperationKind.EXP)

    def prepare_dynamic_mask(self, dt_states: Handle, mask: Handle | None) -> Handle:
        batch, heads, length = dt_states.shape
        shape = batch, heads, length, length
        attn_mask = expanded(dt_states.unsqueeze(2), shape)
        pairs = batch, 1, length, length
        if mask is not None:
            if mask.dtype is DType.BOOL:
                mask = made_from(OperationKind.WHERE, pairs, self.run.compute, mask)
            attn_mask = masked_fill(attn_mask, mask.apart(OperationKind.EQ, dtype=DType.BOOL))
        if length > self.keep_window_size:
            active_mask = made_by(self.run, OperationKind.ZEROS, shape, self.run.compute)
            _, topk_indices = best(detached(attn_mask), self.keep_window_size)
            active_mask = active_mask.apart(OperationKind.SCATTER, topk_indices.narrow(1))
            attn_mask = masked_fill(
                attn_mask, active_mask.apart(OperationKind.EQ, dtype=DType.BOOL)
            )
        return attn_mask


class CrossedExperts(Embedding):
    """Experts of one row each."""

    block = LayerBlock.EXPERTS


class DogeCDMoE(Network):
    """Experts found by two keys, whose pairs count them, beside a dense network."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        bias = config.flag("mlp_bias")
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.num_experts = config.integer("num_experts")
        self.num_keys, self.top_k = (
            isqrt(self.num_experts), config.integer("num_experts_per_tok"),
        )  # fmt: skip
        if config.flag("norm_topk_prob"):
            problem = "true: DogeCDMoE divides its softmax in place, which fails in backward; set it to false"
            error = config.fail("norm_topk_prob", problem)
            raise error
        self.router_gate = Linear(hidden, 2 * self.num_keys, role=WeightRole.ROUTER)
        self.down_embed = CrossedExperts(self.num_experts, hidden)
        self.up_embed = CrossedExperts(self.num_experts, hidden)

    def facts(self) -> MixtureSpec:
        """Its experts, and the network that every token passes."""
        inner, kind = self.down_proj.in_features, self.act_fn.kind
        shared = FeedForwardSpec(intermediate_size=inner, activation=kind, gated=True)
        return MixtureSpec(
            num_experts=self.num_experts, num_experts_per_token=self.top_k,
            expert=FeedForwardSpec(intermediate_size=1, activation=kind),
            router=RouterSpec(), shared=shared, in_own_way=True,
        )  # fmt: skip

    def crossed(self, places: Handle) -> Handle:
        """``indices_x.unsqueeze(-1) * self.num_keys + indices_y.unsqueeze(-2)``."""
        shape = places.shape[1], self.num_keys
        rows = made_from(OperationKind.MUL_SCALAR, shape, DType.INT64, places)
        return made_from(OperationKind.ADD, (shape[0], shape[1] ** 2), DType.INT64, rows, places)

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        bsz, seq_len, width = hidden_states.shape
        tokens = bsz * seq_len
        router_logits = self.router_gate(hidden_states).view(2, tokens, -1)
        values, places = topk(router_logits, self.num_keys)
        scores_x, scores_y = values.unbind(0)
        all_scores = added_crosswise(scores_x, scores_y)
        all_indices = self.crossed(places)
        scores, position_indices = topk(all_scores, self.top_k)
        indices = made_from(
            OperationKind.GATHER, (tokens, self.top_k), DType.INT64, all_indices, position_indices
        )
        routing_weights = softmax(scores)
        down_embed = self.down_embed(indices.shape, indices)
        up_embed = self.up_embed(indices.shape, indices)
        experts_weights = batched_product(down_embed, hidden_states.view(tokens, width, 1)).view(
            tokens, -1
        )
        experts_weights = self.act_fn(experts_weights) * routing_weights
        experts_states = batched_product(experts_weights.view(tokens, 1, -1), up_embed).view(
            bsz, seq_len, -1
        )
        hidden_states = self.down_proj(
            self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )
        hidden_states = hidden_states + experts_states
        return hidden_states, router_logits


class DogeDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = DogeAttention

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.residual_dropout = config.number("hidden_dropout")
        self.input_layernorm = self.norm_class(hidden)
        self.self_attn = self.attention_class(config, kind)
        self.input_residual = Weight(hidden, role=WeightRole.OTHER)
        self.post_attention_layernorm = self.norm_class(hidden)
        self.is_moe = config.flag("is_moe")
        self.mlp: Module = DogeCDMoE(config) if self.is_moe else LlamaMLP(config)
        self.post_attention_residual = Weight(hidden, role=WeightRole.OTHER)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, tables, mask)
        x = dropout(x, self.residual_dropout)
        x = self.operand(self.input_residual) * residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.of_network(x)
        x = dropout(x, self.residual_dropout)
        x = self.operand(self.post_attention_residual) * residual + x
        return x

    def of_network(self, x: Handle) -> Handle:
        """What the network makes, of which a mixture returns its logits too."""
        made: Handle | tuple[Handle, Handle] = self.mlp(x)
        return made[0] if isinstance(made, tuple) else made


class DogeModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = DogeDecoderLayer

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        return {None: causal_mask(self.run, batch, length, written=True)}
