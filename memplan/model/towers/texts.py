"""What a decoder says."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputBody:
    """The output matrix over a vocabulary, and the cross-entropy of the labels."""

    size: int
    rows: int
    table: str
    """The weight that it is where the model ties the two; empty: it is its own."""
    module: str = "lm_head"
    bias: bool = False
