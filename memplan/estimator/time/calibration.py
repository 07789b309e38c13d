"""One measured step of a setup, and what it says of every other one on the same machines.

A step that took longer or shorter than was said is explained by what it is spent on (computing, links between GPUs, the host that
launches kernels, what is offloaded), by how little each of these is known, by what memplan is off for setups that run the same code
(an engine, how it splits, what it quantizes) and by what it is off for this one setup: the likeliest factors are those that need the
least of each one's range. Together they make the step what was measured; the setup's own says nothing of others there, its code's
nothing of other code, the machines' hold for all.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from math import log, sqrt
from statistics import NormalDist
from typing import NamedTuple

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass


class Part(StrEnum):
    """What a factor stretches."""

    COMPUTE = "compute"
    LINKS = "links"
    HOST = "host"
    OFFLOAD = "offload"
    """The link to the host's memory, and what its CPUs do there."""


MOST_FACTOR = 16.0
"""A machine that is so much slower or faster than said is another machine, or ran another setup."""
HALVINGS = 40
CLOSE = 1e-4
MEASURED_LOW, MEASURED_HIGH = 0.93, 1.08
"""The range of a step of the very setup that was measured."""
OWN_LOW, OWN_HIGH = 0.925, 1.08
"""How much longer one setup takes than another of the same machine and code beside what is said of both: of published steps of one source,
model and card four in five of such pairs lie between 0.90 and 1.08, which two setups make together (the half of
``benchmarks/step_times.py`` that figures may be taken from)."""
CODE_LOW, CODE_HIGH = 0.895, 1.115
"""What setups that run other code differ by beside that: an engine of the same name in a fork, in another version. Of the same half four in
five of such pairs lie between 0.82 and 1.21."""
TENTHS = NormalDist().inv_cdf(0.9) - NormalDist().inv_cdf(0.1)
"""Standard deviations between both ends of a range that holds four in five."""


class Bends(NamedTuple):
    """Exponents of one factor."""

    parts: Mapping[Part, float]
    code: float
    """Of setups that run the same code."""
    own: float
    """Of the measured setup alone."""


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
    """Of the usual host."""
    offload: float = 1.0
    between_nodes: float | None = None
    """What one GPU was said to send to other nodes where it was measured, which ``links`` is a factor of [bytes/s]."""
    setup: str = ""
    """``Job.fingerprint`` of the job that was measured; empty: none was, but a node."""
    code: str = ""
    """What code it runs (``Job.code``)."""
    of_code: float = 1.0
    """How many times as long jobs that run it take beside."""
    own: float = 1.0
    """How many times as long that very job takes beside, which says nothing of others."""
    date: str = ""
    """When, if that was written down."""
    driver: str = ""
    """Of that card."""
    torch: str = ""
    """Its version."""

    def __post_init__(self) -> None:
        factors = {part.value: self.factor(part) for part in Part}
        factors |= {"own": self.own, "of_code": self.of_code}
        for name, factor in factors.items():
            if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
                msg = f"calibration: {name}: must be from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}, got {factor:g}"
                raise InputError(msg)

    def factor(self, part: Part) -> float:
        """Of one part."""
        return {
            Part.COMPUTE: self.compute, Part.LINKS: self.links, Part.HOST: self.host,
            Part.OFFLOAD: self.offload,
        }[part]  # fmt: skip

    @property
    def words(self) -> str:
        """What it changes."""
        told = [
            f"{part.value} x {self.factor(part):.2f}" for part in Part if self.factor(part) != 1.0
        ]
        return ", ".join(told) or "as said"


def spread_of(low: float, high: float) -> float:
    """Standard deviation of the logarithm of what a range's ends hold four in five of.

    >>> round(spread_of(OWN_LOW, OWN_HIGH), 3)
    0.06
    """
    return log(high / low) / TENTHS


def bends(shares: Mapping[Part, float], spreads: Mapping[Part, float]) -> Bends:
    """How much of a step's difference each part takes upon itself, as exponents of one factor; the largest is 1.

    Of all factors with which a step takes what was measured the likeliest are those with the least ``Σ (ln f / spread)²``:
    ``ln f`` goes as the part's share of the step times the square of its spread (Lagrange, for a small difference).
    ``spreads``: of the logarithm of what each part takes. What the setup takes for itself is a part like others, which the whole step
    consists of.

    >>> found = bends({Part.COMPUTE: 0.5, Part.HOST: 0.5}, {Part.COMPUTE: 0.1, Part.HOST: 0.2})
    >>> round(found.parts[Part.COMPUTE], 2), found.parts[Part.HOST], round(found.code, 2), round(found.own, 2)
    (0.25, 1.0, 0.37, 0.18)
    """
    weights = {part: share * spreads[part] ** 2 for part, share in shares.items()}
    code = spread_of(CODE_LOW, CODE_HIGH) ** 2
    own = spread_of(OWN_LOW, OWN_HIGH) ** 2
    most = max(code, own, *weights.values())
    parts = {part: weight / most for part, weight in weights.items()}
    return Bends(parts, code / most, own / most)


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
