"""ViTDet's layers, and what ViTMatte makes of them and of the picture."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizedPlacesBody:
    """A table of positions is added, resized to the picture where it does not fit."""

    size: int
    positions: str
    """The table, as ``module.name``; its first row is of no patch."""
    side: int
    """Patches along a side of the pictures that it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedScoresBody:
    """Attention in windows with numbers of distances down and across, all written out (ViTDet)."""

    module: str
    size: int
    num_heads: int
    window: int
    """Side of the windows that see themselves alone; 0: a picture does."""
    relative: bool
    bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelNormBody:
    """A norm over channels, in products and sums (ViTDet)."""

    module: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MattingBody:
    """Features, widened step by step, are joined with ever larger details of the picture (ViTMatte)."""

    details: tuple[int, ...]
    """Channels of each convolution of the picture, the largest picture's first."""
    fused: tuple[int, ...]
    """Channels behind each joining, the smallest picture's first."""


MattersBody = ResizedPlacesBody | WindowedScoresBody | ChannelNormBody | MattingBody
