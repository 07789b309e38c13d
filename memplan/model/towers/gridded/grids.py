"""What holds a picture on its way: variables of the model's, its output, sizes that are read later."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgottenBody:
    """The latest thing that a variable of the model's holds goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedBody:
    """The model returns what is given on from here beside its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelBody:
    """What is given on is one of the sizes that is read later; the model's output holds it meanwhile."""


GridBody = ForgottenBody | ReturnedBody | LevelBody
