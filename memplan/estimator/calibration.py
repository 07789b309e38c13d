"""One measured step of a setup, and what it says of every other one on the same machines.

A step that took longer or shorter than was said is explained by what most of it is spent on: computing, links between GPUs, or
the host that launches kernels. That one is taken to be slower or faster by as much as makes the step what was measured, and the
same factor holds for other setups there.
"""

from collections.abc import Callable
from enum import StrEnum
from math import sqrt

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass


class Part(StrEnum):
    """What a factor stretches."""

    COMPUTE = "compute"
    LINKS = "links"
    HOST = "host"


MOST_FACTOR = 16.0
"""A machine that is so much slower or faster than said is another machine, or ran another setup."""
HALVINGS = 40
CLOSE = 1e-4
MEASURED_LOW, MEASURED_HIGH = 0.93, 1.08
"""The range where a step was measured: steps of one machine differ by that much from setup to setup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How many times as long as said each part takes on somebody's machines.

    >>> Calibration(gpu="h100-sxm-80gb", compute=1.1).factor(Part.LINKS)
    1.0
    """

    gpu: str
    """The catalog's id of the card that it was measured on."""
    compute: float = 1.0
    links: float = 1.0
    host: float = 1.0
    date: str = ""
    """When, if that was written down."""

    def __post_init__(self) -> None:
        for part in Part:
            factor = self.factor(part)
            if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
                msg = f"calibration: {part.value}: must be from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}, got {factor:g}"
                raise InputError(msg)

    def factor(self, part: Part) -> float:
        """Of one part."""
        return {Part.COMPUTE: self.compute, Part.LINKS: self.links, Part.HOST: self.host}[part]

    @classmethod
    def of(cls, gpu: str, part: Part, factor: float) -> "Calibration":
        """One part is what differs."""
        factors = dict.fromkeys(Part, 1.0) | {part: factor}
        return cls(
            gpu=gpu,
            compute=factors[Part.COMPUTE],
            links=factors[Part.LINKS],
            host=factors[Part.HOST],
        )

    @property
    def words(self) -> str:
        """What it changes."""
        told = [
            f"{part.value} x {self.factor(part):.2f}" for part in Part if self.factor(part) != 1.0
        ]
        return ", ".join(told) or "as said"


def solved(step_s: Callable[[float], float], measured_s: float) -> float | None:
    """The factor with which a step takes as long as was measured; None where none does.

    A longer factor makes no step shorter, so halving finds it.

    >>> round(solved(lambda factor: 1.0 + factor, 3.0), 3)
    2.0
    """
    low, high = 1 / MOST_FACTOR, MOST_FACTOR
    if step_s(low) > measured_s * (1 + CLOSE) or step_s(high) < measured_s * (1 - CLOSE):
        return None
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        found = step_s(middle)
        if abs(found / measured_s - 1) <= CLOSE:
            return middle
        low, high = (middle, high) if found < measured_s else (low, middle)
    return sqrt(low * high)
