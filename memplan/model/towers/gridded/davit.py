"""DaViT: windows of patches see themselves, and channels one another (Florence-2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelsBody:
    """Fewer positions of more channels: a convolution, with a norm before or behind it."""

    size: int
    """Channels that it gives."""
    inputs: int
    kernel: int
    stride: int
    padding: int
    """Rows above and below together."""
    first: bool
    """The norm stands before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DavitLayerBody:
    """Two halves, each with convolutions of single channels, attention and a network."""

    size: int
    inner_size: int
    num_heads: int
    num_groups: int
    window: int
    activation: Activation
    bias: bool
    drop_path: tuple[bool, bool]
    """Of each half."""
    recomputed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedMeanBody:
    """Rows and columns as positions; the mean of all stands before all (Florence-2's projector)."""

    size: int
    outputs: int
    frames: int
    """Rows of a fixed table of frames."""


DavitBody = ChannelsBody | DavitLayerBody | PlacedMeanBody
