"""How sound becomes tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalBody:
    """A convolution of a spectrum along time, and an activation."""

    module: str
    kernel: int
    stride: int
    activation: Activation
    padding: int = 0
    channels: int = 0
    """Of the spectrum that the batch brings, where this reads it; 0: it reads what the one before gives."""
    length: int = 0
    """How long that is, where the setup says nothing else [frames]."""
    casts: bool = False
    """The class itself casts the spectrum to the weight's dtype."""
    last: bool = False
    """What it gives is read as tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesBody:
    """What the convolutions gave becomes tokens: fixed positions are added (Whisper)."""

    positions: str
    """The module of their table."""
    cast_back: bool = False
    """The sum is cast to what the convolutions gave."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedFramesBody:
    """Neighbouring frames are averaged in pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurningTablesBody:
    """Cosines and sines of every position, which a stack holds; its input goes on as it is."""

    dim: int
    """Numbers of each head that are turned."""


SoundBody = SignalBody | FramesBody | HalvedFramesBody | TurningTablesBody
