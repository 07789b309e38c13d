"""ERNIE 4.5's mixtures: a router in fp32 whatever the model is, heads turned by fp32 tables.

(transformers 5.23: models/ernie4_5_moe)
"""

from collections.abc import Callable

from memplan.classes.llama import MLP, GatedMLP, LlamaAttention, LlamaDecoderLayer
from memplan.classes.mixed.deepseek import corrected
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureLayer, MixtureModel, SharedExpert
from memplan.classes.mixed.routers import Routed, Router
from memplan.dtypes import DType
from memplan.graph.modules.functional import (
    best,
    clamped,
    divide,
    fp32_linear,
    gather,
    softmax,
    total,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, Turn, repeated, rotate_half
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole


class ErnieMLP(GatedMLP):
    def bias(self, config: ConfigReader) -> bool:
        return config.flag("use_bias")


class ErnieSharedExperts(SharedExpert, ErnieMLP):
    pass


def apply_rotary_apart(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """``x`` and its turned halves are each cast to fp32."""
    dtype = query.dtype
    cos = repeated(cos.unsqueeze(1))
    sin = repeated(sin.unsqueeze(1))
    turned_query = (query.float() * cos) + (rotate_half(query).float() * sin)
    turned_key = (key.float() * cos) + (rotate_half(key).float() * sin)
    return turned_query.to(dtype), turned_key.to(dtype)


class WholeRotaryEmbedding(RotaryEmbedding):
    def cast(self, table: Handle, x: Handle) -> Handle:  # noqa: ARG002
        """They stay in fp32."""
        return table


class ErnieAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_apart)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        bias = config.flag("use_bias")
        return bias, bias


class ErnieStatics(Module):
    def __init__(self, num_experts: int) -> None:
        self.e_score_correction_bias = Weight(1, num_experts, dtype=DType.FP32, trainable=False)

    def forward(self, hidden_states: Handle) -> Handle:
        return corrected(hidden_states, self.operand(self.e_score_correction_bias))


class ErnieTopKRouter(Router):
    is_corrected = returns_fp32 = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.moe_statics = ErnieStatics(self.num_experts)

    def add_matrix(self, hidden: int) -> None:
        self.weight = Weight(self.num_experts, hidden, dtype=DType.FP32, role=WeightRole.ROUTER)

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = fp32_linear(hidden_states, self, self.weight, region=False)
        routing_weights = softmax(router_logits, in_own_dtype=True)
        _, selected_experts = best(self.moe_statics(routing_weights), self.top_k)
        routing_weights = gather(routing_weights, selected_experts)
        routing_weights = divide(routing_weights, clamped(total(routing_weights), bounds=1))
        routing_weights = routing_weights.to(hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


class ErnieSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.gate = ErnieTopKRouter(config)
        self.experts = Experts(config)
        count = config.integer("moe_num_shared_experts", minimum=0)
        self.has_shared = count > 0
        if self.has_shared:
            self.shared_experts = ErnieSharedExperts(config, self.experts.intermediate_dim * count)

    def forward(self, hidden_states: Handle) -> Handle:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        shared_output = self.shared_experts(hidden_states) if self.has_shared else None
        _, top_k_weights, top_k_index = self.gate(hidden_states)
        final_hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
        if shared_output is not None:
            final_hidden_states = final_hidden_states + shared_output
        final_hidden_states = final_hidden_states.reshape(*shape)
        return final_hidden_states.to(hidden_states.dtype)


class ErnieDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = ErnieAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = ErnieSparseMoeBlock
    mlp_class: Callable[[ConfigReader], MLP] = ErnieMLP


class ErnieModel(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = ErnieDecoderLayer
    rotary_class = WholeRotaryEmbedding

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.head_bias = config.flag("use_bias")

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        last = config.optional_integer("moe_layer_end_index", minimum=-1)
        if last is None or last == -1:
            last = config.layers("num_hidden_layers") - 1
        first = config.integer("moe_layer_start_index", default=1, minimum=0)
        interval = config.integer("moe_layer_interval", default=1)
        return (number + 1) % interval == 0 and first <= number <= last
