"""Whole runs, drawn at random: what they need, and whether they live with the figure that memplan gives.

``least_capacity`` is the floor: the least capacity from which on every larger one suffices.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, remember
from tests.accuracy.run_records import kind_of, lives, recorded_runs, said_of

WORDS = {
    "requested_peak": "peak", "reserved_peak": "reserved", "least_capacity": "least capacity",
    "held": "held between steps",
}  # fmt: skip
NAMES = ("one GPU", "DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
OFF = Path(__file__).parent.parent / "data" / "runs_off.json"
"""Runs that die with their figure, how far it is below what they need at most, and what is known of why."""
PEAK = (0.0001, 0.0002)


@dataclass(frozen=True)
class Bars:
    """What a file's runs are held to."""

    section: str
    """Of the accuracy table."""
    figures: dict[str, tuple[float, float]]
    """What 95 of 100 of each engine's runs are within, and what all are; none is more than five times what
    is reached."""
    kinds: tuple[str, ...]
    least_each: int
    """Runs of each of them."""


BARS = {
    "ten_steps": Bars(
        "ten steps",
        {
            "requested_peak": PEAK,
            "reserved_peak": (0.005, 0.005),
            # One granule of 2 MiB of the smallest runs, of a GiB.
            "least_capacity": (0.0025, 0.0025),
        },
        NAMES, 10,
    ),
    "expandable": Bars(
        "expandable segments",
        {"requested_peak": PEAK, "reserved_peak": (0.005, 0.01), "least_capacity": (0.01, 0.01)},
        NAMES, 4,
    ),
    "fresh": Bars(
        "fresh runs",
        {"requested_peak": PEAK, "reserved_peak": (0.005, 0.01), "least_capacity": (0.005, 0.01)},
        NAMES[:1], 120,
    ),
    "unseen": Bars(
        "unseen runs",
        {"requested_peak": PEAK, "reserved_peak": (0.0025, 0.005), "least_capacity": (0.0025, 0.005)},
        NAMES, 2,
    ),
    "loaded": Bars(
        "loaded by device_map",
        {
            "requested_peak": PEAK,
            "reserved_peak": (0.0005, 0.0005),
            "least_capacity": (0.0005, 0.0005),
            "held": (0.0005, 0.0005),
        },
        NAMES[:1], 14,
    ),
    "fsdp1": Bars(
        "FSDP1",
        {
            "requested_peak": PEAK,
            "reserved_peak": (0.005, 0.01),
            "least_capacity": (0.005, 0.009),
            "held": (0.0002, 0.0002),
        },
        ("FSDP1",), 40,
    ),
}  # fmt: skip


class Runs:
    """What is said of each run of a file, each asked for once."""

    def __init__(self, path: Path) -> None:
        self.runs = recorded_runs(path)
        self.said = said_of(self.runs)
        self.by_kind: dict[str, Comparison] = {}
        for run, said in zip(self.runs, self.said, strict=True):
            comparison = self.by_kind.setdefault(kind_of(run), Comparison())
            comparison.add(run, run["truth"], lambda _, said=said: said)

    def below(self) -> dict[str, float]:
        """Of runs that die with their figure, how far it is below the floor."""
        return {
            run["id"]: 1 - said["least_capacity"] / run["truth"]["least_capacity"]
            for run, said in zip(self.runs, self.said, strict=True)
            if not lives(run, said["least_capacity"])
        }

    def rows(self) -> dict[str, dict[str, Any]]:
        """Of the accuracy table."""
        return {
            f"{WORDS[figure]}, {name}": comparison.row(figure)
            for name, comparison in self.by_kind.items()
            for figure in WORDS
            if figure in comparison.errors
        }

    def missed(self, bars: Bars) -> list[tuple[object, ...]]:
        """Bars that are not held."""
        found: list[tuple[object, ...]] = []
        for name, comparison in self.by_kind.items():
            for figure, (p95, worst) in bars.figures.items():
                reached = comparison.quantile(figure, 0.95), comparison.worst(figure)
                if reached[0] > p95 or reached[1][0] > worst:
                    found.append((name, figure, *reached))
        return found


@pytest.mark.long
@pytest.mark.parametrize("name", BARS)
def test_runs(
    checkout: Path, name: str, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = BARS[name]
    runs = Runs(checkout / "tests" / "data" / f"{name}.json")
    with capsys.disabled():
        for kind, comparison in runs.by_kind.items():
            sys.stdout.write(f"\n{bars.section}, {kind}: {comparison.table()}\n")
    assert sorted(runs.by_kind) == sorted(bars.kinds)
    assert min(each.num_records for each in runs.by_kind.values()) >= bars.least_each
    off = json.loads(OFF.read_text(encoding="utf-8"))[name]
    below = runs.below()
    assert set(below) == set(off)
    for run, share in below.items():
        assert share <= off[run]["below"] <= 2 * share, (run, share)
    assert not runs.missed(bars)
    remember(
        bars.section,
        runs.rows(),
        update=pytestconfig.getoption("--update-accuracy"),
        points=[point for each in runs.by_kind.values() for point in each.points("requested_peak")],
        found=runs.by_kind.values(),
    )


def test_what_is_off_is_little_and_has_a_reason() -> None:
    off = json.loads(OFF.read_text(encoding="utf-8"))
    assert {name: len(runs) for name, runs in off.items()} == {
        "ten_steps": 0, "expandable": 0, "fresh": 0, "fsdp1": 0, "loaded": 0, "unseen": 0,
    }  # fmt: skip
    assert all(run["why"] for runs in off.values() for run in runs.values())
