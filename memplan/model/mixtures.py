"""Mixtures of experts, as data: routers and experts."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import FeedForwardSpec


class RouterScore(Enum):
    """How a router's logits become weights of experts."""

    SOFTMAX = "softmax"
    """Over all experts, of which the likeliest are taken (Mixtral)."""
    SOFTMAX_SELECTED = "softmax_selected"
    """The largest logits are taken first, then the softmax over those (Granite, gpt-oss)."""
    SIGMOID = "sigmoid"
    """Each expert scored on its own (DeepSeek-V3)."""
    SQRT_SOFTPLUS = "sqrt_softplus"
    """Each on its own, the root of its softplus (DeepSeek-V4)."""
    SPARSE_MIXER = "sparse_mixer"
    """Phi-3.5-MoE's two draws, each with a gradient estimate of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What sends each token to its experts."""

    score: RouterScore = RouterScore.SOFTMAX
    correction: bool = False
    """A bias is added to the scores, for choosing only; it is a buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSpec:
    """A mixture-of-experts feed-forward network."""

    num_experts: int
    num_experts_per_token: int
    expert: FeedForwardSpec
    """The shape of one routed expert."""
    router: RouterSpec = RouterSpec()
    in_own_way: bool = False
    """The class runs its experts in a way of its own: one after another, each a slice of the stacked
    matrices (DBRX); all of them on every token (Llama 4)."""
    shared: FeedForwardSpec | None = None
    """An expert that every token passes."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a learned gate (Qwen2-MoE)."""
    latent: int = 0
    """Width of the routed experts' inputs and outputs, behind and before projections of their own
    (Nemotron-H's ``moe_latent_size``); 0: the hidden size."""
