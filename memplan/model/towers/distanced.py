"""SpeechT5's layers: scores get queries times a vector of each pair's distance, looked up once for all."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


class Place(Enum):
    """Where a layer stands among those that read the vectors: their gradients are added up on the way back."""

    FIRST = "first"
    """Its sum is the last; what it kept of the vectors is gone by then."""
    MIDDLE = "middle"
    LAST = "last"
    """Its gradient is the first: there is nothing to add it to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairVectorsBody:
    """A norm, dropout, and a vector for each pair of positions, which all layers read."""

    size: int
    norm: str
    table: str
    """The module that distances are looked up in."""
    head_dim: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DistancedLayerBody:
    """``SpeechT5EncoderLayer`` and ``SpeechT5DecoderLayer``: norms stand behind the sums."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    place: Place = Place.MIDDLE
    memory: str = ""
    """The tower that a decoder attends to, by the name that its blocks begin with; it has no distances."""


DistancedBody = PairVectorsBody | DistancedLayerBody
