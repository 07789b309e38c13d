"""Networks of convolutions, part by part.

A part reads what the one before it gave: channels of a picture whose height and width the walk knows
(``Flow.grid``). Where branches part and meet again is said in ``memplan.model.towers.body``.
"""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelsBody:
    """Pictures as the batch brings them."""

    channels: int
    image: tuple[int, int]
    """Height and width where the setup says nothing else [pixels]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionBody:
    """A square convolution; its channels are those of the weight."""

    module: str
    kernel: int
    stride: int = 1
    padding: int = 0
    """Rows that the convolution itself adds, above and below together."""
    bias: bool = False


NetBody = PixelsBody | ConvolutionBody
