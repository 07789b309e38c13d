"""Series of numbers as patches: PatchTST's layers, which attend, and PatchTSMixer's, which mix."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


class SeriesPooling(Enum):
    """What a forecast is made from."""

    ALL = "all"
    """All patches, side by side."""
    FIRST = "first"
    MEAN = "mean"
    GREATEST = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesBody:
    """Series as the batch brings them, scaled by their own statistics and cut; no gradient is theirs."""

    channels: int
    length: int
    patch: int
    num_patches: int
    scaled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPositionsBody:
    """A weight with a row for each patch is added; perhaps a token goes before each series."""

    size: int
    token: bool = False
    dropout: float = 0.0
    kept: bool = False
    """The model's own variable holds what it is added to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesLayerBody:
    """``PatchTSTEncoderLayer``."""

    size: int
    inner_size: int
    num_heads: int
    channels: int
    tokens: int
    """Of a series: its patches, perhaps one more."""
    activation: Activation
    batch_norm: bool
    norms_first: bool
    across_channels: bool
    """Attention also goes over the series at each patch, by the same weights."""
    bias: bool
    """Of the network."""
    attention_dropout: float = 0.0
    dropout: float = 0.0
    """Inside the network."""
    path_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesMixerBody:
    """``PatchTSMixerLayer``."""

    size: int
    channels: int
    patches: int
    widening: int
    batch_norm: bool
    gated: bool
    across_channels: bool
    num_heads: int = 0
    """Of attention beside the mixing of patches; 0: there is none."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastBody:
    """A linear layer to the values that follow, scaled back; the mean of squares is the loss."""

    module: str
    features: int
    steps: int
    channels: int
    size: int
    pooling: SeriesPooling
    dropout: float = 0.0


SeriesPart = SeriesPositionsBody | SeriesLayerBody | SeriesMixerBody | ForecastBody
