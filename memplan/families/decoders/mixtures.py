"""Mixtures of experts of types that have no class yet: what a type fixes, and what its config says."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.llama import read_activation
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec, Normalization, RouterScore, RouterSpec
from memplan.model.networks import FeedForwardSpec

DEEPSEEK_ROUTER = RouterSpec(
    score=RouterScore.SIGMOID,
    fp32_product=True,
    fp32_logits=False,
    correction=True,
    grouped=True,
    normalization=Normalization.IN_PLACE,
    scaled=True,
)
"""DeepSeek-V3's: sigmoid scores, a correction bias, groups ruled out, weights normalized."""

MAX_SOFTCAP = 1e9
"""No cap on logits is larger."""

QWEN_ROUTER = RouterSpec(fp32_logits=False, normalization=Normalization.IN_PLACE, cast_weights=True)
"""Qwen's: a softmax in fp32, weights normalized where ``norm_topk_prob`` says so, cast back."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of routed experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What one type's class fixes."""

    router: RouterSpec
    normalizes: bool | None = None
    """Whether weights are normalized; None reads ``norm_topk_prob``."""
    expert_size: str = "moe_intermediate_size"
    """Which key holds the width of a routed expert."""
    shared_size: str | None = None
    """Which key holds the width of the shared expert, if not a number of routed ones."""
    shared_count: str | None = None
    """Which key counts shared experts of a routed expert's width."""
    shared_first: bool = False
    shared_gate: bool = False
    jitter: str | None = None
    """Which key switches noise on."""
    dense: Callable[[ConfigReader, int], bool] | None = None
    """Which layers, by number, are dense; None: none."""


def typed_or_first_dense(reader: ConfigReader, number: int) -> bool:
    """``mlp_layer_types``, or the first ``first_k_dense_replace`` layers."""
    types = reader.texts("mlp_layer_types")
    if not types:
        return number < reader.integer("first_k_dense_replace", default=0, minimum=0)
    if number >= len(types):
        error = reader.fail("mlp_layer_types", f"names {len(types)} layers, needs more")
        raise error
    return types[number] != "sparse"


def read_mixture(reader: ConfigReader, kind: Mixture) -> MixtureSpec:
    """Experts, shared experts and router.

    Raises ``ConfigError`` where a token would need more experts than there are.
    """
    key = next((name for name in EXPERT_KEYS if name in reader.config), EXPERT_KEYS[0])
    num_experts = reader.integer(key, *EXPERT_KEYS)
    per_token = reader.integer("num_experts_per_tok")
    if per_token > num_experts:
        error = reader.fail("num_experts_per_tok", f"{per_token} of {num_experts} experts")
        raise error
    if kind.router.grouped:
        reader.divide(key, num_experts, "n_group", reader.integer("n_group", default=1))
    size = reader.integer(kind.expert_size)
    shared = _shared_size(reader, kind, size)
    activation = read_activation(reader, "hidden_act")
    expert = FeedForwardSpec(intermediate_size=size, activation=activation, gated=True)
    return MixtureSpec(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert=expert,
        router=_router(reader, kind),
        shared=replace(expert, intermediate_size=shared) if shared else None,
        shared_first=kind.shared_first,
        shared_gate=kind.shared_gate,
    )


def _shared_size(reader: ConfigReader, kind: Mixture, size: int) -> int:
    """Width of the shared expert; 0 without one."""
    if kind.shared_size is not None:
        return reader.integer(kind.shared_size)
    if kind.shared_count is not None:
        return size * reader.integer(kind.shared_count, minimum=0)
    return 0


def _router(reader: ConfigReader, kind: Mixture) -> RouterSpec:
    """The type's router, with what the config may switch."""
    router = kind.router
    normalizes = kind.normalizes
    if normalizes is None:
        normalizes = reader.flag("norm_topk_prob")
    if not normalizes:
        router = replace(router, normalization=Normalization.NONE)
    if router.grouped:
        router = replace(router, one_group=reader.integer("n_group", default=1) == 1)
    if kind.jitter is not None and reader.number(kind.jitter) > 0:
        router = replace(router, jitter=True)
    return router
