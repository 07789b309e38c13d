"""Two towers whose tokens a language model is given as one."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TappedBody:
    """What a layer in the middle of a tower gave, which is read again behind the tower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoDepthsBody:
    """A tower's end and what was tapped, each resized and halved twice, added (DeepSeek-VL's hybrids)."""

    size: int
    """Width of what was tapped."""
    channels: int
    """Of the tower's end."""
    side: int
    """Positions along a side behind it all."""
    neck: str
    projection: str
    share: str
    """The weight that what was tapped is multiplied by, as ``module.name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySideBody:
    """Both towers' tokens through a matrix each, joined, a nonlinearity and a matrix."""

    module: str
    first: tuple[str, str, int]
    """A tower by the name that its blocks begin with, the module that reads it, its width."""
    second: tuple[str, str, int]
    outputs: int


PairBody = TappedBody | TwoDepthsBody | SideBySideBody
