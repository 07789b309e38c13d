"""Runs of ten steps, drawn at random, of five engines: what they need, and whether they live with it.

``least_capacity`` is the floor: the least capacity from which on every larger one suffices.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, remember
from tests.accuracy.run_records import kind_of, lives, recorded_runs, said_of

FIGURES = ("requested_peak", "reserved_peak", "least_capacity")
ONE_GPU = {
    "requested_peak": (0.005, 0.005),
    "reserved_peak": (0.005, 0.03),
    "least_capacity": (0.007, 0.03),
}
"""Figure: what 95 of 100 runs are within, and what all are."""
ENGINES = {
    "requested_peak": (0.005, 0.005),
    "reserved_peak": (0.01, 0.03),
    "least_capacity": (0.01, 0.03),
}
MOST_TOO_LOW = 0.005
"""No least capacity is further below what the run needs."""
NAMES = ("one GPU", "DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")


class Runs:
    """What is said of each run of a file, each asked for once."""

    def __init__(self, path: Path) -> None:
        self.runs = recorded_runs(path)
        self.said = [said_of(run) for run in self.runs]
        self.by_kind: dict[str, Comparison] = {}
        for run, said in zip(self.runs, self.said, strict=True):
            comparison = self.by_kind.setdefault(kind_of(run), Comparison())
            comparison.add(run, run["truth"], _given(said))

    def dying(self) -> list[str]:
        """Those that die with the figure they are given."""
        pairs = zip(self.runs, self.said, strict=True)
        return [run["id"] for run, said in pairs if not lives(run, said["least_capacity"])]

    def too_low(self) -> dict[str, float]:
        """Those whose figure is further below the floor than it may be."""
        pairs = zip(self.runs, self.said, strict=True)
        errors = {
            run["id"]: said["least_capacity"] / run["truth"]["least_capacity"] - 1
            for run, said in pairs
        }
        return {name: error for name, error in errors.items() if error < -MOST_TOO_LOW}

    def rows(self) -> dict[str, dict[str, Any]]:
        """Of the accuracy table."""
        words = {
            "requested_peak": "peak",
            "reserved_peak": "reserved",
            "least_capacity": "least capacity",
        }
        return {
            f"{words[figure]}, {name}": comparison.row(figure)
            for name, comparison in self.by_kind.items()
            for figure in FIGURES
        }

    def check(self) -> None:
        """Every bar of every engine."""
        missed = []
        for name, comparison in self.by_kind.items():
            for figure, (p95, worst) in (ONE_GPU if name == "one GPU" else ENGINES).items():
                found = comparison.quantile(figure, 0.95), comparison.worst(figure)
                if found[0] > p95 or found[1][0] > worst:
                    missed.append((name, figure, *found))
        assert not missed


def _given(said: dict[str, int]) -> Any:
    return lambda _: said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "section", "least_each"),
    [
        pytest.param("ten_steps", "ten steps", 10, id="ten-steps"),
        pytest.param("expandable", "expandable segments", 4, id="expandable"),
    ],
)
def test_runs(
    checkout: Path,
    name: str,
    section: str,
    least_each: int,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = Runs(checkout / "tests" / "data" / f"{name}.json")
    with capsys.disabled():
        for kind, comparison in runs.by_kind.items():
            sys.stdout.write(f"\n{section}, {kind}: {comparison.table()}\n")
    assert sorted(runs.by_kind) == sorted(NAMES)
    assert min(comparison.num_records for comparison in runs.by_kind.values()) >= least_each
    assert not runs.dying()
    assert not runs.too_low()
    runs.check()
    update = pytestconfig.getoption("--update-accuracy")
    points = [point for each in runs.by_kind.values() for point in each.points("requested_peak")]
    remember(section, runs.rows(), update=update, points=points)
