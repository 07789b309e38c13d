"""Mixtures of experts, as data: routers and experts."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import FeedForwardSpec
    from memplan.model.norms import NormSpec


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


class Normalization(Enum):
    """How the weights of a token's experts are made to sum to one."""

    NONE = "none"
    IN_PLACE = "in_place"
    """Divided in place: autograd keeps a copy of the undivided ones."""
    COPY = "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What sends each token to its experts."""

    score: RouterScore = RouterScore.SOFTMAX
    correction: bool = False
    """A bias is added to the scores, for choosing only; it is a buffer."""
    table_rows: int = 0
    """A fixed table of so many rows says which experts a token id goes to (DeepSeek-V4)."""
    normalization: Normalization = Normalization.NONE
    scaled: bool = False
    """The weights are multiplied by a constant."""
    input_norm: NormSpec | None = None
    """The hidden states are normed, and multiplied by a vector and by a constant (Gemma 4)."""
    expert_scales: bool = False
    """The weights are multiplied by a trained number of each expert (Gemma 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryTokenSpec:
    """Experts that all multiply every token, times a score that is mostly 0 (Llama 4)."""

    num_experts: int
    num_chosen: int
    """Experts whose scores are not 0 for a token."""
    expert: FeedForwardSpec
    """The shape of each, and of the one beside them that every token passes."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideDenseSpec:
    """Experts beside a dense network: these read what it is added to, each behind norms (Gemma 4)."""

    dense: FeedForwardSpec
    mixture: MixtureSpec
    norm: NormSpec
