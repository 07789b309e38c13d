"""Pictures at several sizes, kept on the way down and joined on the way up again."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelBody:
    """What is given on is one of the sizes that is read later; the model's output holds it meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedBody:
    """Scores of each class are made as large as the picture, and give the loss of each pixel."""

    num_classes: int


LevelsBody = SegmentedBody | LevelBody
