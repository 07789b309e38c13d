"""Rarer attention, as data: latent keys and values, indexers, disentangled distances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, RotarySpec

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
    shared_projections: bool = False
    """Distances pass the projections of queries and keys (DeBERTa-v3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """DeepSeek-V3.2's choice of the tokens that each token attends to."""

    num_heads: int
    head_dim: int
    rotary_dim: int
    top_k: int
    """Tokens that are chosen at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """DeepSeek's multi-head latent attention: keys and values come out of a narrow vector."""

    num_heads: int
    query_rank: int | None
    """Width between the two layers that make the queries; None where one layer makes them."""
    key_value_rank: int
    plain_head_dim: int
    """What is not rotated of a query's or key's head."""
    value_head_dim: int
    rotary: RotarySpec
    """Its ``dim`` is the rest of the head; the keys share it."""
    norm: NormSpec
    """On the two narrow vectors."""
    bias: bool = False
    """The layers into the narrow vectors and out of the values have a bias."""
    dropout: float = 0.0
    indexer: IndexerSpec | None = None
    """Only some earlier tokens are attended to (DeepSeek-V3.2)."""

    @property
    def scores(self) -> AttentionSpec:
        """The attention that runs on the widened heads."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.plain_head_dim + self.rotary.dim,
            value_head_dim=self.value_head_dim,
            rotary=self.rotary,
            dropout=self.dropout,
        )
