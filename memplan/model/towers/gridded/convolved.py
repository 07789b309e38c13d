"""Layers of convolutions over pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolvedLayerBody:
    """A depthwise convolution, a norm and two linear layers around a nonlinearity (ConvNeXt)."""

    size: int
    inner_size: int
    activation: Activation
    response_norm: str = ""
    """A module that divides each channel's norm over the picture by all channels' mean (V2)."""
    scale: str = ""
    """The weight that multiplies what is added, as ``module.name``; empty: none does."""
    drop_path: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DownsamplingBody:
    """A convolution whose stride is its kernel: fewer positions, more channels."""

    module: str
    size: int
    """Channels that it reads."""
    side: int


ConvolvedBody = ConvolvedLayerBody | DownsamplingBody
