"""What a loss is computed from, and how log-probabilities come out of logits."""

from enum import Enum


class Objective(Enum):
    """What the head of a language model ends in."""

    TASK = "task"
    """The loss of the model's own task."""
    PREFERENCE = "preference"
    """The log-probability of every sequence, and a loss over these."""
    LIKELIHOOD_AND_PREFERENCE = "likelihood and preference"
    """The same, and the cross-entropy of the chosen half."""
    POLICY_GRADIENT = "policy gradient"
    """The log-probability of every generated token, and the entropy, which has no gradient."""
    DIVERGENCE = "divergence"
    """The distance between all logits and a teacher's (the generalized Jensen-Shannon divergence)."""
    LOGITS = "logits"
    """Logits and no more."""
    LAST_LOGITS = "last logits"
    """Logits of the last token alone, as generation takes them."""
    VALUES = "values"
    """One number for every token."""


class LogProbabilities(Enum):
    """How the log-probabilities of tokens come out of logits."""

    ROWWISE = "rowwise"
    """Sequence by sequence out of all logits (TRL up to 1.12, ``selective_log_softmax``)."""
    IN_PLACE = "in-place"
    """Out of all logits at once by flash-attn's cross-entropy, whose gradient takes the logits' place (verl
    0.9.1, ``logprobs_from_logits_flash_attn``)."""
    WHOLE = "whole"
    """Out of fp32 copies of all logits at once (torchtune 0.6.1, ``modules/transformer.py`` and
    ``rlhf/sequence_processing.py``, ``logits_to_logprobs``)."""
    FUSED = "fused"
    """Tile by tile out of the hidden states; logits are never there whole (TRL 1.16,
    ``ChunkedLogProbFunction``)."""


JOINED = frozenset({
    Objective.PREFERENCE, Objective.LIKELIHOOD_AND_PREFERENCE, Objective.POLICY_GRADIENT,
    Objective.DIVERGENCE,
})  # fmt: skip
"""Objectives whose loss is computed once passes of other models have run."""
