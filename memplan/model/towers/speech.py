"""What encoders of speech have beside wav2vec 2.0's own parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedPositionsBody:
    """Several grouped convolutions over the tokens, each normed, added to them (data2vec)."""

    size: int
    kernel: int
    activation: Activation
    modules: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DistancesBody:
    """A number for each head and pair of positions, by how far they are from one another (WavLM).

    All layers read it; what the block was given goes on as it is.
    """

    table: str
    """The module of the table that buckets of distances are looked up in."""
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedBody:
    """From here on every layer's result stays until the loss is there; this goes on as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameClassesBody:
    """Classes of each frame, and the loss of the likeliest."""

    module: str
    size: int
    classes: int
    weights: str = ""
    """Shares of all that was collected, as ``module.name``, by which it is added up; empty: the last alone."""


SpeechBody = StackedPositionsBody | DistancesBody | CollectedBody | FrameClassesBody
