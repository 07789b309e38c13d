"""How near each tolerance of the tests is to what is reached: those more than ``MOST_SPARE`` times as wide are named.

``python benchmarks/bounds.py tests/accuracy`` runs these tests and, of every line that compares with ``pytest.approx``
under a tolerance of its own, or a share of records' errors with a bar, notes the largest difference and the tolerance there. A bound that is idle lets a slip
through; one that only some machine reaches says so beside it.
"""

import sys
from math import inf, isfinite
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.accuracy.comparison import Comparison

MOST_SPARE = 5
"""A bound is at most so many times what is reached."""
Approximation: Any = type(pytest.approx(1.0))
"""What compares one number with another."""
FIXED = 1e-6
"""Tolerances up to pytest's own are there for rounding."""


class Bounds:
    """A pytest plugin that looks on as numbers are compared."""

    def __init__(self) -> None:
        self.reached: dict[str, tuple[float, float, int]] = {}
        """Of each line: the largest share of its tolerance, the tolerance there, and how often it was asked."""
        usual = Approximation.__eq__

        def equal(expected: Any, actual: object) -> bool:
            self.note(expected, actual)
            return bool(usual(expected, actual))

        Approximation.__eq__ = equal

    def note(self, expected: Any, actual: object) -> None:
        """One comparison of two numbers."""
        if expected.rel is None and expected.abs is None:
            return
        true: Any = expected.expected
        if not isinstance(actual, int | float) or not isinstance(true, int | float):
            return
        tolerance = float(expected.tolerance)
        if not isfinite(tolerance) or tolerance <= FIXED * abs(true):
            return
        self.reach(_line(), abs(actual - true) / tolerance, tolerance / abs(true) if true else inf)

    def reach(self, line: str, share: float, tolerance: float) -> None:
        """So much of a bound is reached."""
        worst, bound, count = self.reached.get(line, (0.0, 0.0, 0))
        if share >= worst:
            worst, bound = share, tolerance
        self.reached[line] = worst, bound, count + 1

    def pytest_collection_finish(self) -> None:
        """Errors of records, figure by figure, are looked at when a bar is held against them."""
        usual_worst, usual_quantile = Comparison.worst, Comparison.quantile

        def worst(comparison: Comparison, name: str) -> tuple[float, str]:
            error, whose = usual_worst(comparison, name)
            return Error(error, self, name), whose

        def quantile(comparison: Comparison, name: str, share: float) -> float:
            return Error(usual_quantile(comparison, name, share), self, f"{name}, {share}")

        Comparison.worst = worst  # type: ignore[method-assign]
        Comparison.quantile = quantile  # type: ignore[method-assign]

    def loose(self) -> list[str]:
        """Lines whose tolerance is too wide, the idlest first."""
        rows = sorted((share, line) for line, (share, *_) in self.reached.items())
        return [
            f"{line}: {share:.3f} of a bound of {self.reached[line][1]:.1e}, "
            f"{self.reached[line][2]} times"
            for share, line in rows
            if share * MOST_SPARE < 1
        ]


class Error(float):
    """An error that tells which bar was held against it."""

    def __new__(cls, value: float, bounds: Bounds, name: str) -> Self:
        """The number itself."""
        made = super().__new__(cls, value)
        made.bounds, made.name = bounds, name
        return made

    bounds: Bounds
    name: str

    def __le__(self, bar: float) -> bool:
        if bar > FIXED:
            self.bounds.reach(f"{_line()} ({self.name})", float(self) / bar, bar)
        return float(self) <= bar


def _line() -> str:
    """The innermost line of a test that is running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "tests"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
    return "?"


def main() -> int:
    """Run the tests that are named, and say which bounds are idle."""
    bounds = Bounds()
    status = pytest.main(["-q", "-n", "0", "--no-header", *sys.argv[1:]], plugins=[bounds])
    loose = bounds.loose()
    sys.stdout.write(
        "\n".join([*loose, f"{len(loose)} of {len(bounds.reached)} bounds are idle", ""])
    )
    return int(status) or int(bool(loose))


if __name__ == "__main__":
    sys.exit(main())
