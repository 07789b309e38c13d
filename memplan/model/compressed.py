"""DeepSeek-V4's attention and residual streams, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.latent import IndexerSpec
    from memplan.model.norms import NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """One more key and value for every so many tokens."""

    rate: int
    """Tokens that an entry stands for."""
    overlapping: bool = False
    """Each entry is made from the window before too, by projections of their own."""
    indexer: IndexerSpec | None = None
    """Which entries each token attends to; None: all that are past."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttentionSpec:
    """One head that is key and value of every query head, compressed entries beside it."""

    scores: AttentionSpec
    """Heads, the rotated share of each, the window, sinks."""
    query_rank: int
    """Width between the two layers that make the queries."""
    output_groups: int
    """Groups of heads, each projected by itself."""
    output_rank: int
    """Width that each group is projected to, before the last layer."""
    norm: NormSpec
    compressor: CompressorSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsSpec:
    """Hyper-connections: several residual streams, mixed before and behind each of a layer's parts."""

    count: int
    iterations: int
    """Of the normalization of rows and columns, which makes a mixture doubly stochastic."""
