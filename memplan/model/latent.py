"""Rarer attention, as data: latent keys and values, indexers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, RotarySpec

if TYPE_CHECKING:
    from memplan.model.norms import NormSpec


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
