"""Aria's text model: Llama's layers with a mixture whose router chooses by logits (transformers 5.23, models/aria)."""

from memplan.classes.llama import LlamaDecoderLayer, LlamaMLP
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureLayer, MixtureModel
from memplan.classes.mixed.routers import Routed, Router
from memplan.graph.modules.basic import ActivationModule
from memplan.graph.modules.functional import linear, softmax, topk
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Weight
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
from memplan.model.networks import Activation


class AriaTextTopKRouter(Router):
    score = RouterScore.SOFTMAX_SELECTED

    def __init__(self, config: ConfigReader) -> None:
        self.num_experts, self.top_k = config.integer("moe_num_experts"), config.integer("moe_topk")
        if self.top_k > self.num_experts:
            error = config.fail("moe_topk", f"{self.top_k} of {self.num_experts} experts")
            raise error
        self.add_matrix(config.integer("hidden_size"))

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight)
        top_k_logits, top_k_index = topk(router_logits, self.top_k)
        top_k_weights = softmax(top_k_logits)
        return router_logits, top_k_weights, top_k_index


class AriaExperts(Experts):
    is_transposed = True

    def __init__(self, config: ConfigReader) -> None:
        self.config = config
        self.num_experts = config.integer("moe_num_experts")
        self.num_active = config.integer("moe_topk")
        self.hidden_dim = config.integer("hidden_size")
        self.intermediate_dim = config.integer("intermediate_size")
        self.gate_up_proj = Weight(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.down_proj = Weight(self.num_experts, self.hidden_dim, self.intermediate_dim)
        self.act_fn = ActivationModule(Activation.SILU)  # whatever the config says


class AriaSharedExpertsMLP(LlamaMLP):
    def __init__(self, config: ConfigReader) -> None:
        shared = config.integer("moe_num_shared_experts")
        super().__init__(config, shared * config.integer("intermediate_size"))


class AriaTextMoELayer(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = AriaTextTopKRouter(config)
        self.experts = AriaExperts(config)
        self.shared_experts = AriaSharedExpertsMLP(config)

    def forward(self, hidden_states: Handle) -> Handle:
        original_shape = hidden_states.shape
        hidden_states = hidden_states.seen_as(-1, original_shape[-1])
        _, top_k_weights, top_k_index = self.router(hidden_states)
        expert_output = self.experts(hidden_states, top_k_index, top_k_weights).view(
            *original_shape
        )
        shared_expert_output = self.shared_experts(hidden_states.seen_as(*original_shape))
        return expert_output + shared_expert_output


class AriaTextDecoderLayer(MixtureLayer):
    block_class = AriaTextMoELayer


class AriaTextModel(MixtureModel):
    adds_router_loss = False
    layer_class: type[LlamaDecoderLayer] = AriaTextDecoderLayer
