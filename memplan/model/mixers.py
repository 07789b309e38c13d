"""What may stand where attention does, and parts that are only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.attention import (
    AttentionSpec,
)
from memplan.model.compressed import CompressedAttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.mixtures import (
    BesideDenseSpec,
    EveryTokenSpec,
)
from memplan.model.shared_keys import SharedKeysSpec

if TYPE_CHECKING:
    from memplan.model.norms import NormSpec
    from memplan.model.parameters import ParameterShape


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSpec:
    """A part of a layer whose weights are known, but whose operations are not written down."""

    parameters: tuple[ParameterShape, ...] = ()
    """None at all where the layer has no such part."""


NOTHING = CountedSpec()
"""A part that the layer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerSpec:
    """What stands in attention's place and is written as a class."""

    scans: bool = False
    """Whether its kernel is a choice of its own."""
    shares: bool = False
    """Layers run the weights of an earlier one."""
    scores: AttentionSpec | None = None
    """The attention beside it, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAttentionSpec:
    """Attention to what towers gave, with norms on queries and keys (Llama 3.2 Vision)."""

    scores: AttentionSpec
    norm: NormSpec


OtherMixer = (
    MixerSpec | SharedKeysSpec | MemoryAttentionSpec | CompressedAttentionSpec | CountedSpec
)
"""What mixes tokens without attention's scores."""


WITH_SCORES = (
    MixerSpec,
    SharedKeysSpec,
    CompressedAttentionSpec,
)
"""Those that have an attention of their own, ``scores``."""


OtherNetwork = EveryTokenSpec | BesideDenseSpec | CountedSpec
"""A feed-forward network of another kind."""


TokenMixer = AttentionSpec | LatentAttentionSpec | OtherMixer
"""What can mix the tokens of a layer."""
