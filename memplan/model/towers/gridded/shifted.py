"""Attention in windows that are shifted from layer to layer, and patches merged in between."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftedWindowsBody:
    """Windows of a picture see themselves alone: cosines, and a number for each distance (Swin V2)."""

    module: str
    size: int
    num_heads: int
    window: int
    """Side of a window [positions]."""
    shift: int
    """Positions by which the picture is rolled before it is cut; 0: it is not."""
    bias_width: int
    """Inside the network that makes a number of each distance."""
    bias: bool
    dropout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedSquaresBody:
    """Four neighbours become one, through a matrix (Swin)."""

    module: str
    size: int


ShiftedBody = ShiftedWindowsBody | MergedSquaresBody
