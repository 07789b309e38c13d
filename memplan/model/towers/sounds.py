"""How sound becomes tokens."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


class SignalNorm(Enum):
    """What follows a convolution of a signal."""

    NONE = "none"
    GROUP = "group"
    """A group norm with a group for each channel, before the activation."""
    LAYER = "layer"
    """A layer norm over the channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalBody:
    """A convolution along time, a norm or none, an activation."""

    module: str
    kernel: int
    stride: int
    activation: Activation
    padding: int = 0
    bias: bool = True
    norm: SignalNorm = SignalNorm.NONE
    norm_module: str = ""
    channels: int = 0
    """Of the signal that the batch brings, where this reads it; 0: it reads what the one before gives."""
    length: int = 0
    """How long that is, where the setup says nothing else [samples or frames]."""
    rate: int = 0
    """Samples a second; 0: clips are of this length whatever they hold."""
    casts: bool = False
    """The class itself casts the signal to the weight's dtype."""
    last: bool = False
    """What it gives is read as tokens."""
    leaf: bool = False
    """The class makes the signal require a gradient."""
    recomputed: bool = False
    """Full checkpointing drops what is inside, as it does a layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeaturesBody:
    """A row of numbers for each frame, as the batch brings them."""

    features: int
    length: int
    """How many frames, where the setup says nothing else."""
    rate: int
    """Frames a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesBody:
    """What the convolutions gave becomes tokens: fixed positions are added (Whisper)."""

    size: int
    positions: str
    """The module of their table."""
    looked_up: bool = True
    """Its rows are looked up, not added as they are."""
    cast_back: bool = False
    """The sum is cast to what the convolutions gave."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedSignalBody:
    """A convolution along time, half of whose channels gate the others (Speech2Text)."""

    module: str
    kernel: int
    stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsBody:
    """A copy in rows, or in channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinesBody:
    """Times a number; sines out of a buffer of so many rows are added."""

    size: int
    rows: int
    scaled: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedFramesBody:
    """Neighbouring frames are averaged in pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedFramesBody:
    """A norm, a linear layer, and a vector in place of masked stretches (wav2vec 2.0)."""

    features: int
    size: int
    norm: str = ""
    linear: str = "projection"
    dropout: float = 0.0
    mask: str = ""
    """The vector, as ``module.name``, where time is masked in training."""
    returned: bool = False
    """The model returns what the norm gave, beside its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionConvolutionBody:
    """A grouped convolution over the tokens, added to them (wav2vec 2.0)."""

    size: int
    kernel: int
    activation: Activation
    groups: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptBody:
    """Logits of every frame, and connectionist temporal classification."""

    size: int
    rows: int
    module: str = "lm_head"
    dropout: float = 0.0


SoundBody = (
    SignalBody
    | FeaturesBody
    | FramesBody
    | GatedSignalBody
    | RowsBody
    | SinesBody
    | HalvedFramesBody
    | ProjectedFramesBody
    | PositionConvolutionBody
    | TranscriptBody
)
