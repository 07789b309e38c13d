"""Routers of mixtures of experts: what sends each token to its experts, and with which weights.

(transformers 5.23: models/mixtral, models/qwen2_moe, models/qwen3_moe, models/granitemoe, models/phimoe)
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Parameter
from memplan.graph.modules.basic import fp32_under_autocast
from memplan.graph.modules.functional import (
    detached,
    divide_in_place,
    estimated,
    gather,
    jittered,
    largest,
    linear,
    masked_fill,
    scatter,
    softmax,
    topk,
    total,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
from memplan.model.parameters import WeightRole

Routed = tuple[Handle, Handle, Handle]
"""Logits of all experts, the weights of each token's own, and which they are."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of routed experts."""


def experts_key(config: ConfigReader, keys: Sequence[str] = EXPERT_KEYS) -> str:
    """What this config calls their number."""
    return next((name for name in keys if name in config.config), keys[0])


def num_experts(config: ConfigReader, keys: Sequence[str] = EXPERT_KEYS) -> int:
    """Routed experts of a layer."""
    return config.integer(experts_key(config, keys), *keys)


class Router(Module):
    """What they have in common: a matrix of a row for each expert."""

    score = RouterScore.SOFTMAX
    """How its logits become weights."""
    is_corrected = False
    """A bias is added to the scores, for choosing only."""
    is_recorded = True
    """A loss on all layers' routers reads its logits."""
    returns_fp32 = False
    """The logits that it returns, and a loss on them reads, are in fp32 whatever it is given."""
    count_keys: Sequence[str] = EXPERT_KEYS
    """What its config may call the number of experts."""

    def __init__(self, config: ConfigReader) -> None:
        self.top_k = config.integer("num_experts_per_tok")
        self.num_experts = num_experts(config, self.count_keys)
        if self.top_k > self.num_experts:
            error = config.fail(
                "num_experts_per_tok", f"{self.top_k} of {self.num_experts} experts"
            )
            raise error
        self.add_matrix(config.integer("hidden_size"))

    def add_matrix(self, hidden: int) -> None:
        """In a parameter of its own."""
        self.weight = Weight(self.num_experts, hidden, role=WeightRole.ROUTER)


class MixtralTopKRouter(Router):
    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight)
        router_probs = softmax(router_logits.float())
        router_top_value, router_indices = topk(router_probs, self.top_k)
        router_top_value = divide_in_place(router_top_value, total(router_top_value))
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class QwenTopKRouter(Router):
    """``Qwen2MoeTopKRouter``, ``Qwen3MoeTopKRouter``, ``OlmoeTopKRouter``: rows are seen as rows once more, so that their
    gradient is added up behind the matrix's."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.norm_topk_prob = config.flag("norm_topk_prob")

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.seen_as(-1, hidden_states.shape[-1])
        router_logits = linear(hidden_states, self, self.weight)
        router_probs = softmax(router_logits, dtype=DType.FP32)
        router_top_value, router_indices = topk(router_probs, self.top_k)
        if self.norm_topk_prob:
            router_top_value = divide_in_place(router_top_value, total(router_top_value))
        router_top_value = router_top_value.to(router_logits.dtype)
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class GraniteMoeTopKRouter(Router):
    score = RouterScore.SOFTMAX_SELECTED
    returns_fp32 = True

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = linear(hidden_states, self, self.weight).float()
        top_k_logits, top_k_index = topk(router_logits, self.top_k)
        top_k_weights = softmax(top_k_logits).to(hidden_states.dtype)
        return router_logits, top_k_weights, top_k_index


class LinearRouter(Router):
    """One whose class is derived from ``torch.nn.Linear``."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.weight.of_linear = True

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Its class is not ``torch.nn.Linear`` itself: it is never packed."""
        return self.run.parameter(name, *weight.shape, role=weight.role)


class PhimoeTopKRouter(LinearRouter):
    """A ``torch.nn.Linear`` that draws two experts of its result."""

    score = RouterScore.SPARSE_MIXER

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.input_jitter_noise = config.number("input_jitter_noise")

    def forward(self, hidden_states: Handle) -> Routed:
        if self.input_jitter_noise > 0:
            hidden_states = jittered(hidden_states)
        router_logits = linear(hidden_states, self, self.weight)
        routing_weights, selected_experts = sparsemixer(router_logits)
        return router_logits, routing_weights, selected_experts


def sparsemixer(scores: Handle) -> tuple[Handle, Handle]:
    """Two draws, the second without the first one's expert."""
    mask_logits_threshold, max_ind = largest(detached(scores))
    factor = clamped_below(detached(scores), mask_logits_threshold)
    mask_logits_threshold = too_small(detached(scores), mask_logits_threshold, factor)
    masked_gates = masked_fill(scores, mask_logits_threshold)
    selected_experts = gumbel(detached(masked_gates))
    masked_gates = softmax(masked_gates)
    multiplier_o = gather(masked_gates, selected_experts)
    max_scores, max_ind = largest(detached(masked_gates))
    mask_for_one = heun_mask(selected_experts, max_ind, max_scores)
    mask_for_one = weighted_mask(mask_for_one, masked_gates.dtype)
    multiplier = estimated(scores, multiplier_o, selected_experts, masked_gates)
    masked_scores = scatter(scores, selected_experts)
    mask_logits_threshold, max_ind = largest(detached(masked_scores))
    factor = clamped_below(detached(scores), mask_logits_threshold)
    mask_logits_threshold = too_small(detached(scores), mask_logits_threshold, factor)
    masked_gates_top2 = masked_fill(masked_scores, mask_logits_threshold)
    selected_experts_top2 = gumbel(detached(masked_gates_top2))
    masked_gates_top2 = softmax(masked_gates_top2)
    multiplier_top2_o = gather(masked_gates_top2, selected_experts_top2)
    max_scores, max_ind = largest(detached(masked_gates_top2))
    mask_for_one_top2 = heun_mask(selected_experts_top2, max_ind, max_scores)
    mask_for_one_top2 = weighted_mask(mask_for_one_top2, masked_gates_top2.dtype)
    multiplier_top2 = estimated(scores, multiplier_top2_o, selected_experts_top2, masked_gates_top2)
    multiplier = concatenate(multiplier, multiplier_top2)
    selected_experts = concatenate(selected_experts, selected_experts_top2)
    del mask_for_one, mask_for_one_top2
    return multiplier, selected_experts


def clamped_below(scores: Handle, threshold: Handle) -> Handle:
    """``scores.abs().clamp(min=threshold)``."""
    return scores.apart(OperationKind.ABS).apart(OperationKind.CLAMP, threshold)


def too_small(scores: Handle, threshold: Handle, factor: Handle) -> Handle:
    """``((threshold - scores) / factor) > 2 * jitter_eps``."""
    ratio = threshold.apart(OperationKind.SUB, scores).apart(OperationKind.DIV, factor)
    return ratio.apart(OperationKind.GT, dtype=DType.BOOL)


def gumbel(masked_gates: Handle) -> Handle:
    """Where the gates less the logarithm of exponential noise are largest."""
    noise = made_by(
        masked_gates.run, OperationKind.UNIFORM_IN_PLACE, masked_gates.shape, masked_gates.dtype
    )
    noise = fp32_under_autocast(noise).apart(OperationKind.LOG)
    drawn = masked_gates.apart(OperationKind.SUB, noise, dtype=noise.dtype)
    del noise
    _, selected = largest(drawn)
    return selected


def heun_mask(selected_experts: Handle, max_ind: Handle, max_scores: Handle) -> Handle:
    """Whether the likeliest was drawn, or three times of four anyway."""
    run, shape = selected_experts.run, max_scores.shape
    equal = selected_experts.apart(OperationKind.EQ, max_ind, dtype=DType.BOOL)
    random = made_by(run, OperationKind.UNIFORM_IN_PLACE, shape, max_scores.dtype)
    chance = random.apart(OperationKind.GT, dtype=DType.BOOL)
    del random
    return equal.apart(OperationKind.BITWISE_AND, chance)


def weighted_mask(mask: Handle, dtype: DType) -> Handle:
    """``torch.add(0.3333, mask, alpha=0.6667).type_as(...)``."""
    return mask.apart(OperationKind.ADD_SCALAR, dtype=DType.FP32).to(dtype)
