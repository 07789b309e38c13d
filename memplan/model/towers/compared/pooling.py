"""One vector of each picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerBody:
    """The first token's vector of each picture, normed."""

    size: int
    norm: str
    """The norm's module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPoolerBody:
    """A trained query attends over all tokens, and a network follows (SigLIP)."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaresBody:
    """Patches averaged in squares by a matrix of shares in fp32; rows of padding are left out (Gemma 4)."""

    size: int
    side: int
    """Patches along a side of a square."""
    tokens: int
    """What a picture gives."""
    standardized: bool = False
    """Moved and scaled by two buffers."""


PoolingBody = SquaresBody | PoolerBody | AttentionPoolerBody
