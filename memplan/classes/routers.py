"""Routers of mixtures of experts: what sends each token to its experts, and with which weights.

(transformers 5.23: models/mixtral, models/qwen2_moe, models/qwen3_moe, models/granitemoe, models/gpt_oss)
"""

from memplan.dtypes import DType
from memplan.graph.modules.functional import divide_in_place, linear, softmax, topk, total
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole

Routed = tuple[Handle, Handle, Handle]
"""Logits of all experts, the weights of each token's own, and which they are."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of routed experts."""


def num_experts(config: ConfigReader) -> int:
    """Routed experts of a layer."""
    key = next((name for name in EXPERT_KEYS if name in config.config), EXPERT_KEYS[0])
    return config.integer(key, *EXPERT_KEYS)


class Router(Module):
    """What they have in common: a matrix of a row for each expert."""

    returns_fp32 = False
    """The logits that it returns, and a loss on them reads, are in fp32 whatever it is given."""

    def __init__(self, config: ConfigReader) -> None:
        self.top_k = config.integer("num_experts_per_tok")
        self.num_experts = num_experts(config)
        self.weight = Weight(
            self.num_experts, config.integer("hidden_size"), role=WeightRole.ROUTER
        )

    def forward(self, hidden_states: Handle) -> Routed:
        """Scores of all experts, and the best of them."""
        raise NotImplementedError


class MixtralTopKRouter(Router):
    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight)
        router_probs = softmax(router_logits.float())
        router_top_value, router_indices = topk(router_probs, self.top_k)
        router_top_value = divide_in_place(router_top_value, total(router_top_value))
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class QwenTopKRouter(Router):
    """``Qwen2MoeTopKRouter``, ``Qwen3MoeTopKRouter``, ``OlmoeTopKRouter``."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob")

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight)
        router_probs = softmax(router_logits, dtype=DType.FP32)
        router_top_value, router_indices = topk(router_probs, self.top_k)
        if self.norm_topk_prob:
            router_top_value = divide_in_place(router_top_value, total(router_top_value))
        router_top_value = router_top_value.to(router_logits.dtype)
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class GraniteMoeTopKRouter(Router):
    returns_fp32 = True

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight).float()
        top_k_logits, top_k_index = topk(router_logits, self.top_k)
        top_k_weights = softmax(top_k_logits).to(hidden_states.dtype)
        return router_logits, top_k_weights, top_k_index


class GptOssTopKRouter(Router):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.bias = Weight(self.num_experts, role=WeightRole.OTHER)

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight, self.bias)
        router_top_value, router_indices = topk(router_logits, self.top_k)
        router_scores = softmax(router_top_value, in_own_dtype=True)
        return router_logits, router_scores, router_indices
