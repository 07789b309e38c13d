"""Every measurement that was sent (``memplan verify --record``) beside what is predicted of its run.

A new one is a file in ``sent/`` and nothing else. One that is off is named in ``sent_off.json``, with how far it may
be off, and what is known of why.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memplan.report.verify import Verified
from memplan.verify.replay import replayed
from tests.accuracy.verdicts import judged, remember_verdicts

FILES = sorted((Path(__file__).parent / "sent").glob("*.json"))
PEAK, RESERVED = 0.01, 0.03
LOOSEST = 5
"""No bound is more than so many times what is reached."""
OFF: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("sent_off.json").read_text(encoding="utf-8")
)
"""File -> how far its peaks, or what it reserves, may be further off than that, and why."""
USUAL = {"peak": PEAK, "reserved": RESERVED}


@cache
def run_of(path: Path) -> Verified:
    """Estimated once for both that ask."""
    return replayed(path)


def errors_of(run: Verified) -> dict[str, float]:
    """The largest of each kind."""
    found = {"peak": max(map(abs, run.peak_errors), default=0.0)}
    if not (run.measured.is_fake or run.measured.num_retries):
        reserved = (abs(each.error) for each in run.figures if each.what == "reserved")
        found["reserved"] = max(reserved, default=0.0)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sent(path: Path) -> None:
    run = run_of(path)
    assert run.is_agreed, "the verdict is wrong"
    assert run.estimate.num_params == run.measured.num_params or not run.measured.num_params
    off = OFF.get(path.name, {})
    for name, error in errors_of(run).items():
        assert error <= off.get(name, USUAL[name]), name
        if name in off:
            assert error > USUAL[name], f"{name} is off no more: leave it out"
            assert off[name] <= LOOSEST * error, f"{name}: the bound is too loose"
    context = run.measured.context_bytes
    if context is not None and run.measured.death is None:
        overhead = run.beside_bytes
        assert overhead.low <= context <= overhead.high


@pytest.mark.long
def test_verdicts(pytestconfig: pytest.Config) -> None:
    """Of cards that nothing else crowded."""
    runs = [(path, run_of(path)) for path in FILES]
    known = (
        judged(
            run.estimate, run.verdict, record=path.stem, source="memplan verify",
            gpu=run.measured.gpu,
            died=run.measured.death is not None,
        )
        for path, run in runs
        if run.verdict is not None and not run.measured.is_fake and not run.is_crowded
    )  # fmt: skip
    update = pytestconfig.getoption("--update-accuracy")
    remember_verdicts("sent by memplan verify", known, {}, update=update)


def test_some_were_sent() -> None:
    assert FILES
    assert OFF.keys() <= {path.name for path in FILES}
    for each in OFF.values():
        assert each["why"]
        assert each.keys() - {"why"}
        assert each.keys() <= {*USUAL, "why"}
