"""Attention whose keys and values other layers read too, as data."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.norms import NormSpec


class KeySource(Enum):
    """Where a layer has its keys and values from."""

    OWN = "own"
    HANDED_ON = "handed_on"
    """Its own, which the model keeps for later layers."""
    EARLIER = "earlier"
    """What the last layer with the same mask has handed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeysSpec:
    """Gemma 4's attention: queries, keys and values are normed one after another; late layers make
    queries alone."""

    scores: AttentionSpec
    """Heads, rotary embedding and window."""
    norm: NormSpec
    """On each head of queries and keys; values are normed without a weight."""
    source: KeySource = KeySource.OWN
    values_from_keys: bool = False
    """Values are what the keys' layer gives, before its norm."""
