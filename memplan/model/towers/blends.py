"""Words and patches in one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.towers.patches import PatchesBody
    from memplan.model.towers.texts import TypedTokensBody


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsPatchesBody:
    """A text's tokens, then patches picked by index, each with a row for its kind (ViLT)."""

    words: TypedTokensBody
    patches: PatchesBody
    positions: str
    """The weight of the patches' positions, resized to each picture, as ``module.name``."""
    kinds: str
    """The module of the kinds' table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsBody:
    """Of a sequence of both, the words."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedBody:
    """The sum of what the class returns, as it has no loss of its own."""


BlendBody = WordsPatchesBody | WordsBody | SummedBody
