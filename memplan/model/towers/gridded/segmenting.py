"""What Segment Anything's encoder computes: layers in windows, and a neck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedLayerBody:
    """A layer whose scores get numbers of distances down and across (``SamVisionLayer``)."""

    size: int
    inner_size: int
    num_heads: int
    window: int
    """Side of the windows that see themselves alone; 0: a picture does."""
    relative: bool
    bias: bool
    dropout: float
    activation: Activation
    written_out: bool = False
    """The class has no kernel for its scores, whatever is asked for (GOT-OCR 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskNeckBody:
    """Two convolutions, each with a norm over the channels (``SamVisionNeck``)."""

    size: int
    outputs: int


SegmentingBody = WindowedLayerBody | MaskNeckBody
