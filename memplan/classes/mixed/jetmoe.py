"""JetMoE: experts for queries and output of attention, and for the network.

(transformers 5.23: models/jetmoe)
"""

from collections.abc import Callable

from memplan.classes.llama import DecoderLayer, LayerKind, LlamaModel, SelfAttention
from memplan.classes.mixed.mixtures import MixtureBlock
from memplan.classes.mixed.routers import Router
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.attention import attention_function
from memplan.graph.modules.basic import ActivationModule, Linear, RMSNorm
from memplan.graph.modules.functional import (
    index,
    made_from,
    part_of,
    product,
    repeated,
    rows_added_to_zeros,
    softmax,
    sort,
    topk,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, apply_rotary, concatenate, turn_function
from memplan.model.attention import AttentionForm, AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec, RouterScore, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole

Routes = tuple[Handle, Handle, Handle]
"""Where each token's rows go once they are sorted by expert, the token of each, and its weight."""


class JetMoeParallelExperts(Module):
    block = LayerBlock.EXPERTS

    def __init__(self, shape: tuple[int, int, int], active: int, *, matrices: int = 1) -> None:
        self.num_experts, self.output_size, self.input_size = shape
        self.share = ExpertShare(self.num_experts, active, matrices)
        self.weight = Weight(*shape)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A stack."""
        return self.run.parameter(name, *weight.shape, module=self.within, experts=self.share)

    def forward(self, inputs: Handle) -> Handle:
        """Each expert's rows times its matrix; the first ones have one more where they do not divide."""
        weight, count = self.operand(self.weight), self.num_experts
        each, rest = divmod(inputs.shape[0], count)
        input_list = inputs.split(*(each + (number < rest) for number in range(count)), dim=0)
        output_list = [product(part, part_of(weight, count)) for part in input_list]
        results = concatenate(*output_list, dim=0)
        return results


class JetMoeTopKGating(Router):
    score = RouterScore.SOFTMAX_SELECTED
    returns_fp32 = True

    def add_matrix(self, hidden: int) -> None:
        self.layer = Linear(hidden, self.num_experts, role=WeightRole.ROUTER)

    def forward(self, hidden_states: Handle) -> tuple[Routes, Handle]:
        logits = self.layer(hidden_states).float()
        top_k_logits, top_k_indices = topk(logits, self.top_k)
        top_k_gates = softmax(top_k_logits).to(hidden_states.dtype)
        blank = made_by(self.run, OperationKind.ZEROS, logits.shape, top_k_gates.dtype)
        gates = made_from(OperationKind.SCATTER, logits.shape, blank.dtype, blank, top_k_indices)
        counted = gates.apart(OperationKind.TO, dtype=DType.INT64)
        made_from(OperationKind.SUM, (self.num_experts,), DType.INT64, counted)
        del counted
        top_k_experts = top_k_indices.view(-1)
        _, index_sorted_experts = sort(top_k_experts)
        batch_index = index_sorted_experts.apart(OperationKind.FLOOR_DIVIDE)
        top_k_gates = top_k_gates.view(-1)
        batch_gates = index(top_k_gates, index_sorted_experts, index_sorted_experts.shape)
        return (index_sorted_experts, batch_index, batch_gates), logits


class JetMoeMoE(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.activation = ActivationModule(read_activation(config, "activation_function"))
        self.bias = Weight(hidden)
        count, active = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
        self.input_linear = JetMoeParallelExperts((count, 2 * inner, hidden), active, matrices=2)
        self.output_linear = JetMoeParallelExperts((count, hidden, inner), active)
        self.router = JetMoeTopKGating(config)

    def facts(self) -> MixtureSpec:
        """What others read of it."""
        inner, router = self.output_linear.input_size, self.router
        kind = self.activation.kind
        return MixtureSpec(
            num_experts=router.num_experts, num_experts_per_token=router.top_k,
            expert=FeedForwardSpec(intermediate_size=inner, activation=kind, gated=True),
            router=RouterSpec(score=router.score), in_own_way=True,
        )  # fmt: skip

    def forward(self, layer_input: Handle) -> Handle:
        shape = layer_input.shape
        layer_input = layer_input.reshape(-1, shape[-1])
        (_, batch_index, batch_gates), _router_logits = self.router(layer_input)
        expert_inputs = index(layer_input, batch_index, (batch_index.numel, shape[-1]))
        hidden_states = self.input_linear(expert_inputs)
        width = hidden_states.shape[-1] // 2
        chunked_hidden_states = hidden_states.split(width, width)
        hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
        expert_outputs = self.output_linear(hidden_states)
        expert_outputs = expert_outputs * batch_gates.unsqueeze(1)
        layer_output = rows_added_to_zeros(expert_outputs, batch_index, layer_input.shape)
        layer_output = layer_output.view(*shape)
        layer_output = layer_output + self.operand(self.bias)
        return layer_output


class JetMoeMoA(Module):
    """Pairs of queries' and outputs' projections."""

    def __init__(self, config: ConfigReader, width: int) -> None:
        hidden = config.integer("hidden_size")
        self.bias = Weight(hidden)
        count, active = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
        self.input_linear = JetMoeParallelExperts((count, width, hidden), active)
        self.output_linear = JetMoeParallelExperts((count, hidden, width), active)
        self.router = JetMoeTopKGating(config)

    def map(self, layer_input: Handle) -> tuple[Handle, Handle, Routes]:
        batch, length, emb_size = layer_input.shape
        layer_input = layer_input.reshape(-1, emb_size)
        topo_info, router_logits = self.router(layer_input)
        index_sorted_experts, batch_index, _batch_gates = topo_info
        expert_inputs = index(layer_input, batch_index, (batch_index.numel, emb_size))
        expert_outputs = self.input_linear(expert_inputs)
        layer_output = rows_added_to_zeros(
            expert_outputs, index_sorted_experts, expert_outputs.shape
        )
        layer_output = layer_output.view(batch, length, self.router.top_k, -1)
        return layer_output, router_logits, topo_info

    def reduce(self, layer_input: Handle, topo_info: Routes) -> Handle:
        batch, length, _, hidden_size = layer_input.shape
        layer_input = layer_input.reshape(-1, hidden_size)
        index_sorted_experts, batch_index, batch_gates = topo_info
        expert_inputs = index(layer_input, index_sorted_experts, layer_input.shape)
        expert_outputs = self.output_linear(expert_inputs)
        expert_outputs = expert_outputs * batch_gates.unsqueeze(1)
        width = expert_outputs.shape[-1]
        layer_output = rows_added_to_zeros(expert_outputs, batch_index, (batch * length, width))
        layer_output = layer_output.view(batch, length, width)
        layer_output = layer_output + self.operand(self.bias)
        return layer_output


class JetMoeAttention(SelfAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        self.num_heads, self.head_dim = (
            config.integer("num_key_value_heads"), config.integer("kv_channels"),
        )  # fmt: skip
        self.top_k = config.integer("num_experts_per_tok")
        self.attention_dropout = config.number("attention_dropout")
        width = self.num_heads * self.head_dim
        self.experts = JetMoeMoA(config, width)
        self.kv_proj = Linear(config.integer("hidden_size"), 2 * width)

    def facts(self) -> AttentionSpec:
        """Its keys and values are repeated for every expert's queries."""
        heads = self.num_heads * self.top_k
        return AttentionSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=self.head_dim, form=AttentionForm.OWN,
            rotary=RotarySpec(dim=self.head_dim), dropout=self.attention_dropout,
        )  # fmt: skip

    def forward(
        self, x: Handle, tables: Tables, mask: Handle | None
    ) -> tuple[Handle, Handle | None, Handle]:
        batch, length, _ = x.shape
        query, router_logits, topo_info = self.experts.map(x)
        width = self.num_heads * self.head_dim
        key, value = self.kv_proj(x).split(width, width)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, apply_rotary)(query, key, cos, sin)
        key = repeated(key, self.top_k, dim=1)
        value = repeated(value, self.top_k, dim=1)
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.view(batch, length, self.top_k, -1)
        out = self.experts.reduce(out, topo_info)
        return out, weights, router_logits


class JetMoeDecoderLayer(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.mlp = JetMoeMoE(config)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.self_attention = JetMoeAttention(config, kind)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _, _ = self.self_attention(x, tables, mask)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class JetMoeModel(LlamaModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = JetMoeDecoderLayer
    checkpoints = False
