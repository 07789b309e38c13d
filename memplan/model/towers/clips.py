"""How clips become tokens."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipBody:
    """A convolution over a clip whose stride is its kernel; positions are fixed, and no weights (VideoMAE)."""

    size: int
    channels: int
    image: tuple[int, int]
    """Height and width of a frame where the setup says nothing else [pixels]."""
    patch: tuple[int, int]
    frames: int
    span: int
    """Frames that a patch spans."""
    projection: str
