"""Parts of projectors: a tower's tokens on their way to a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class CropBody:
    """All tokens of a picture but its first; a copy, as what reads them wants rows."""

    size: int
    last: bool = False
    """But its last, as a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedPatchesBody:
    """Neighbouring patches become one vector, copied so often on the way (pixel shuffle)."""

    size: int
    side: int
    copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedBody:
    """Half of the numbers through a nonlinearity, times the other half (Aya Vision)."""

    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCropsBody:
    """Crops become rows again, each of which a trained vector ends, behind the whole picture (LLaVA-NeXT)."""

    size: int
    crops: int
    """With the whole picture."""
    newline: str
    """The vector, as ``module.name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledProjectionBody:
    """Patches are averaged in squares, normed, and multiplied by a weight (Gemma 3)."""

    size: int
    outputs: int
    tokens: int
    """Of a picture, behind the pooling."""
    norm: str
    weight: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualWordsBody:
    """Scores of visual words become shares, and a mixture of their rows in a table (Ovis 2)."""

    rows: int
    spare: int
    """Rows that no patch is scored for."""
    size: int
    table: str


ProjectingBody = (
    CropBody
    | JoinedPatchesBody
    | HalvedBody
    | PackedCropsBody
    | PooledProjectionBody
    | VisualWordsBody
)
