"""How clips become tokens, and layers that tell frames from places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


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


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesPatchesBody:
    """Each frame's patches behind a token of its own, then all in a row behind one (TimeSformer)."""

    size: int
    channels: int
    image: tuple[int, int]
    """Height and width of a frame, which no setup changes [pixels]."""
    patch: tuple[int, int]
    frames: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesLayerBody:
    """``TimesformerLayer``: each place over all frames, then each frame's places, then a network."""

    size: int
    inner_size: int
    num_heads: int
    frames: int
    bias: bool
    """Of queries, keys and values."""
    divided: bool
    """Each place sees its own in other frames first, and its own frame then; else all see all."""
    activation: Activation
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: bool = False


VideoBody = ClipBody | FramesPatchesBody | FramesLayerBody
