"""OpenAI's privacy filter: gpt-oss' layers, read both ways (transformers 5.23, models/openai_privacy_filter)."""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    Window,
)
from memplan.classes.mixed.experts import (
    NarrowExperts,
    chosen_mask,
    rows_of,
)
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
)
from memplan.classes.mixed.routers import Routed, Router
from memplan.classes.mixed.sinks import (
    GptOssDecoderLayer,
    HalfRotaryEmbedding,
    SinkAttention,
    recomputed,
    sinks_of,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import ExpertShare, Parameter
from memplan.graph.modules.attention import Attended, matmul
from memplan.graph.modules.basic import (
    Norm,
    UpcastRMSNorm,
    dropout,
)
from memplan.graph.modules.functional import (
    add_rows,
    index,
    less_largest,
    part_of,
    product,
    softmax,
    topk,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import two_sided_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import (
    Tables,
    concatenate,
    turn_function,
)
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
from memplan.model.parameters import WeightRole


class FilterAttention(SinkAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.sinks = Weight(self.num_heads)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, turned_in_pairs)(query, key, cos, sin)
        query = query * 1.0
        key = key * 1.0
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        start, groups = len(self.run.segment.operations), query.shape[1] // key.shape[1]
        key_states = key.repeat_heads(groups)
        value_states = value.repeat_heads(groups)
        attn_weights = matmul(query, key_states.transpose(2, 3)) * 1.0
        if mask is not None:
            attn_weights = attn_weights + mask
        sinks = sinks_of(self, self.sinks, attn_weights)
        combined_logits = concatenate(attn_weights, sinks)
        combined_logits = less_largest(combined_logits)
        probs = softmax(combined_logits, dtype=DType.FP32)
        scores = probs.narrow(attn_weights.shape[-1])
        attn_weights = dropout(scores, probability).to(value_states.dtype)
        attn_output = matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous()
        recomputed(self.run, start)
        return attn_output, attn_weights


def turned_in_pairs(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """``apply_rotary_pos_emb`` of every other number."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned_query = _turned(query, cos, sin)
    turned_key = _turned(key, cos, sin)
    return turned_query, turned_key


def _turned(x: Handle, cos: Handle, sin: Handle) -> Handle:
    width = x.shape[-1] // 2
    first_half, second_half = x.narrow(width), x.narrow(width)
    first = first_half * cos - second_half * sin
    second = second_half * cos + first_half * sin
    return concatenate(first, second)


class FilterRouter(Router):
    score = RouterScore.SOFTMAX_SELECTED

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.weight = Weight(self.num_experts, config.integer("hidden_size"))
        self.bias = Weight(self.num_experts, role=WeightRole.OTHER)

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = product(
            hidden_states.float(),
            self.operand(self.weight).float(),
            self.operand(self.bias).float(),
        )
        router_top_value, router_indices = topk(router_logits, self.top_k)
        router_scores = softmax(router_top_value, in_own_dtype=True)
        router_scores = router_scores / 4.0
        return router_logits, router_scores, router_indices


class FilterExperts(NarrowExperts):
    """In fp32, whatever the model is."""

    as_modules = False
    in_turn = True
    is_transposed = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        count, inner, hidden = self.num_experts, self.intermediate_dim, self.hidden_dim
        del self.gate_up_proj, self.down_proj
        self.weights.clear()
        self.gate_up_proj = Weight(count, hidden, 2 * inner)
        self.gate_up_proj_bias = Weight(count, 2 * inner)
        self.down_proj = Weight(count, inner, hidden)
        self.down_proj_bias = Weight(count, hidden)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A stack, or all experts' biases."""
        fused = weight in (self.gate_up_proj, self.gate_up_proj_bias)
        share = ExpertShare(self.num_experts, self.num_active, 2 if fused else 1)
        return self.run.parameter(name, *weight.shape, module=self.within, experts=share)

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        width = gate_up_out.shape[-1] // 2
        gate, up = gate_up_out.split(width, width)
        gate = gate.unary(OperationKind.CLAMP)
        up = up.unary(OperationKind.CLAMP)
        glu = gate * (gate * 1.702).unary(OperationKind.SIGMOID)
        gated_output = (up + 1) * glu
        return gated_output

    def biased(self, x: Handle, stack: Handle, biases: Handle) -> Handle:
        """``x @ stack[number].float() + biases[number].float()``."""
        made = product(x, part_of(stack, self.num_experts).float())
        width = made.shape[-1]
        bias = Handle(x.run, x.run.slice(biases.record, width), (width,)).float()
        return made + bias

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        run, count = self.run, self.num_experts
        next_states = made_by(run, OperationKind.ZEROS, hidden_states.shape, DType.FP32)
        expert_mask = chosen_mask(top_k_index, count)
        first, first_bias, last, last_bias = (self.operand(each) for each in self.weights.values())
        for _ in range(count):
            top_k_pos, token_idx = rows_of(expert_mask, top_k_index.numel, count)
            rows = token_idx.numel
            current_state = index(hidden_states, token_idx, (rows, self.hidden_dim))
            gate_up = self.biased(current_state.float(), first, first_bias)
            gated_output = self.apply_gate(gate_up).float()
            out = self.biased(gated_output.float(), last, last_bias)
            weighted_output = out * index(top_k_weights, top_k_pos, (rows, 1)).float()
            next_states = add_rows(next_states, weighted_output, token_idx)
        return next_states.to(hidden_states.dtype)


class FilterMLP(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = FilterRouter(config)
        self.experts = FilterExperts(config)

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])
        _, router_scores, router_indices = self.router(hidden_states)
        hidden_states = self.experts(hidden_states, router_indices, router_scores)
        hidden_states = hidden_states * 4.0
        hidden_states = hidden_states.reshape(*shape)
        return hidden_states, router_scores


class FilterLayer(GptOssDecoderLayer):
    attention_class: type[LlamaAttention] = FilterAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = FilterMLP

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:  # noqa: ARG002
        return self.block_class(config)


class FilterModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = FilterLayer
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    rotary_class = HalfRotaryEmbedding
    two_sided = eager_only = True
    speaks = False

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [LayerKind(config.integer("sliding_window"))] * config.layers("num_hidden_layers")

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        run = self.run
        return {each: two_sided_mask(run, batch, length, window=each) for each in self.masked}
