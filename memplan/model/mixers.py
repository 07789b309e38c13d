"""What may stand where attention does, and parts that are not there."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass
from memplan.model.attention import (
    AttentionSpec,
)
from memplan.model.latent import LatentAttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentSpec:
    """A part that the layer does not have."""


NOTHING = AbsentSpec()


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerSpec:
    """What stands in attention's place and is written as a class."""

    scans: bool = False
    """Whether its kernel is a choice of its own."""
    shares: bool = False
    """Layers run the weights of an earlier one."""
    scores: AttentionSpec | None = None
    """The attention beside it, where there is one."""


TokenMixer = AttentionSpec | LatentAttentionSpec | MixerSpec | AbsentSpec
"""What can mix the tokens of a layer."""
