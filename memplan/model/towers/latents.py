"""Few latent vectors that read many tokens (Perceiver)."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTokensBody:
    """Rows of two tables, added: as many tokens as there are positions."""

    size: int
    length: int
    tokens: str
    positions: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QueriesBody:
    """A weight, seen once for each sample, reads what was there: that becomes what layers attend to."""

    weight: str
    """As ``module.name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingBody:
    """Attention with scores written out, to oneself or to what was there, and its output layer."""

    module: str
    size: int
    """Width of what asks."""
    source: int
    """Width of what is asked; 0: the same asks itself."""
    key_width: int
    value_width: int
    outputs: int
    num_heads: int
    dropout: float
    added: bool
    """What asks is added to what is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpellingBody:
    """Scores of all tokens by the table of the embedding, a bias, and the loss."""

    rows: int
    table: str
    bias: str


LatentsBody = PlacedTokensBody | QueriesBody | ReadingBody | SpellingBody
