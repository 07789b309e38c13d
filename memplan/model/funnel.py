"""Funnel Transformer: blocks of layers that halve the sequence between them, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.units import ceil_div

if TYPE_CHECKING:
    from memplan.model.networks import FeedForwardSpec
    from memplan.model.norms import NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FunnelSpec:
    """Its encoder's blocks and its decoder's layers, which are all alike."""

    block_sizes: tuple[int, ...]
    """Layers of each block."""
    block_repeats: tuple[int, ...]
    """How often each of a block's layers runs."""
    decoder_layers: int
    num_heads: int
    head_dim: int
    network: FeedForwardSpec
    norm: NormSpec
    keeps_first: bool
    """The first token stays by itself where tokens are pooled."""
    truncates: bool
    """The last one makes room for it."""
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def pooled(self, length: int) -> int:
        """Tokens that two by two make of so many."""
        return ceil_div(length + (self.keeps_first and not self.truncates), 2)

    def lengths(self, seq_len: int) -> list[int]:
        """Tokens of each block."""
        found = [seq_len]
        for _ in self.block_sizes[1:]:
            found.append(self.pooled(found[-1]) if found[-1] > 1 + self.keeps_first else found[-1])
        return found

    def distances(self, seq_len: int) -> list[tuple[int, int]]:
        """Distances of each block's tokens from the block's before, and from one another."""
        places = list(range(seq_len))
        found = [(0, _span(places, places, stride=1, shift=1))]
        for number in range(1, len(self.block_sizes)):
            pooled = self._pooled_places(places, number)
            before = _span(places, pooled, stride=2 ** (number - 1), shift=2)
            places = pooled
            found.append((before, _span(places, places, stride=2**number, shift=1)))
        return found

    def _pooled_places(self, places: list[int], number: int) -> list[int]:
        if not self.keeps_first:
            return places[::2]
        rest = places[1:-1] if self.truncates else places[1:]
        return [1 - 2**number, *rest[::2]]


def _span(places: list[int], pooled: list[int], *, stride: int, shift: int) -> int:
    farthest = pooled[0] - places[0] + shift * len(pooled) * stride
    nearest = pooled[0] - places[-1]
    return ceil_div(farthest - (nearest - 1), stride)
