"""How a tower reads token ids, and what a decoder says."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensBody:
    """A text tower's ids become tokens: two tables, added (CLIP)."""

    size: int
    num_positions: int
    tokens: str
    """The module of the ids' table."""
    positions: str
    """That of the positions'."""
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedTokensBody:
    """Rows of three tables, of tokens, positions and types, added, and the norm of the sum (BERT)."""

    size: int
    num_positions: int
    counted: bool = False
    """Positions are counted in the ids, so that each sequence has its own (RoBERTa)."""
    sums_in_place: bool = False
    """Positions are added where the sum of the two others lies (ChineseCLIP, ALIGN, ViLT)."""
    dropout: float = 0.0


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


TextBody = DecodedTokensBody | TokensBody | TypedTokensBody
