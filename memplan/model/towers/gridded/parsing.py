"""UPerNet's heads: a picture's sizes joined to one, and classes of every pixel."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedLevelsBody:
    """The last size too, and a norm on each that is read: the others are let go."""

    norms: tuple[tuple[int, str, int], ...]
    """Which size, the norm's module, and its channels; without a module it is read as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxiliaryHead:
    """Convolutions on one size, and classes of their own."""

    level: int
    width: int
    num_convolutions: int
    joins_input: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsingBody:
    """The smallest size pooled at several scales, the others joined to it, and the loss."""

    channels: tuple[int, ...]
    """Of each size."""
    width: int
    scales: tuple[int, ...]
    num_classes: int
    auxiliary: AuxiliaryHead | None = None


ParsersBody = NormedLevelsBody | ParsingBody
