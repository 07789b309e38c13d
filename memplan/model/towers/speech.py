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


SpeechBody = StackedPositionsBody
