"""How a tower reads token ids, and what a decoder says."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedTokensBody:
    """A decoder's tokens as the batch brings them: a table times a number, positions added, a norm (mBART)."""

    size: int
    num_positions: int
    tokens: str
    positions: str
    norm: str
    dropout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputBody:
    """The output matrix over a vocabulary, and the cross-entropy of the labels."""

    size: int
    rows: int
    table: str
    """The weight that it is where the model ties the two; empty: it is its own."""
    module: str = "lm_head"
    upcast: bool = False
    """Logits are widened to fp32 before the loss."""
    bias: bool = False


TextBody = DecodedTokensBody
