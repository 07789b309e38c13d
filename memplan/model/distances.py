"""Disentangled attention's distances, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.norms import NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceSpec:
    """What contents are compared with beside each other: how far apart they stand (DeBERTa)."""

    max_distance: int
    """Distances either way that have a row in the table; 0 for no table [tokens]."""
    content_to_position: bool = False
    position_to_content: bool = False
    dropout: float = 0.0
    """Probability on the table."""
    norm: NormSpec | None = None
    """A norm that the table passes once for all layers (DeBERTa-v3)."""
    flat_heads: bool = False
    """Heads and batch are one dimension, and the scores scaled one by one (DeBERTa-v2)."""
    log_buckets: bool = False
    """Distances are computed in floating point, since far ones share a row (DeBERTa-v2)."""
    shared_projections: bool = False
    """Distances pass the projections of queries and keys (DeBERTa-v3)."""
