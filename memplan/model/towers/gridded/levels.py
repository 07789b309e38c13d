"""Pictures at several sizes, kept on the way down and joined on the way up again."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelBody:
    """What is given on is one of the sizes that is read later; the model's output holds it meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpsampledBody:
    """Sides twice as long, each number mixed from four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLevelBody:
    """The latest level left, gated together with the smaller one's result, and upsampled (GLPN)."""

    size: int
    """Channels of the level."""
    width: int
    """Channels that they are made to; where they are the same already, no convolution does."""
    first: bool
    """There is no smaller one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthBody:
    """A number for each pixel, from 0 to the greatest depth, and the loss on its logarithm (GLPN)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedBody:
    """Scores of each class are made as large as the picture, and give the loss of each pixel."""

    num_classes: int


LevelsBody = SegmentedBody | LevelBody | UpsampledBody | FusedLevelBody | DepthBody
