"""Layers whose heads are turned in part, by position (Moonshine)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class TurningTablesBody:
    """Cosines and sines of every position, which a stack holds; its input goes on as it is."""

    dim: int
    """Numbers of each head that are turned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnedLayerBody:
    """``MoonshineEncoderLayer`` and ``MoonshineDecoderLayer``: norms without biases, no dropout in sums."""

    size: int
    inner_size: int
    attention: AttentionSpec
    activation: Activation
    padding: int = 0
    """Zeros put behind each head before the scores."""
    cross_attention: AttentionSpec | None = None
    """A decoder's, to what another tower gives."""
    memory: str = ""
    """That tower, by the name that its blocks begin with."""
    gated: bool = False
    """Half of what the network's first matrix gives, through the nonlinearity, multiplies the rest."""


TurnedBody = TurningTablesBody | TurnedLayerBody
