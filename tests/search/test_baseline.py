from typing import Any

import pytest

from memplan.report.baseline import baseline_lines
from memplan.search.baseline import Baseline


def row(peak: int, verdict: str = "fits", **changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "gpu": "g",
        "zero_stage": 2,
        "peak_bytes": peak,
        "verdict": verdict,
        **changes,
    }


@pytest.mark.parametrize(
    ("now", "tolerance", "moves", "regressions"),
    [
        pytest.param(row(1000), 0, 0, 0, id="the same"),
        pytest.param(row(1010), 0, 1, 1, id="more"),
        pytest.param(row(1010), 0.02, 1, 0, id="within the tolerance"),
        pytest.param(row(1010), 0.01, 1, 0, id="exactly the tolerance"),
        pytest.param(row(900), 0, 1, 0, id="less"),
        pytest.param(row(1000, "tight"), 0.5, 1, 1, id="a worse verdict"),
        pytest.param(row(2000, "OOM"), 0.5, 1, 1, id="OOM"),
    ],
)
def test_moves(now: dict[str, Any], tolerance: float, moves: int, regressions: int) -> None:
    baseline = Baseline([row(1000)])
    baseline.compare(now)
    assert (len(baseline.moves), len(baseline.regressions(tolerance))) == (moves, regressions)


def test_a_better_verdict_is_no_regression() -> None:
    baseline = Baseline([row(1000, "OOM")])
    baseline.compare(row(1000, "tight"))
    assert len(baseline.moves) == 1
    assert not baseline.regressions(0)


def test_rows_are_found_by_what_was_asked_in_any_order() -> None:
    baseline = Baseline([row(1, zero_stage=stage) for stage in (0, 1, 2)])
    for stage in (2, 0, 3):
        baseline.compare(row(1, zero_stage=stage))
    assert (baseline.num_compared, baseline.num_new, baseline.num_gone) == (2, 1, 1)


def test_a_column_that_the_baseline_did_not_know_names_no_row() -> None:
    baseline = Baseline([row(1)])
    baseline.compare(row(1, tensor_parallel=1))
    assert (baseline.num_compared, baseline.num_new) == (1, 0)


def test_the_lines_name_what_moved() -> None:
    baseline = Baseline([row(2**30), row(2**30, zero_stage=3)])
    baseline.compare(row(2**31, "OOM"))
    first, second = baseline_lines(baseline, name="old.json", tolerance=0.02)
    assert first == "Since old.json: 1 of 1 rows moved, 1 for the worse beyond 2 %; 0 new, 1 gone"
    assert second == "! stage 2, on g: peak 1.00 -> 2.00 GiB (+100.00 %), fits -> OOM"
