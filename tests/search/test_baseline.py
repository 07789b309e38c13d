from typing import Any

import pytest

from memplan.report.rows.baseline import baseline_lines
from memplan.search.baseline import Baseline, Origin


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
    assert (baseline.num_compared, len(baseline.new), len(baseline.gone)) == (2, 1, 1)
    assert not baseline.is_matched


def test_a_column_that_the_baseline_did_not_know_names_no_row() -> None:
    baseline = Baseline([row(1)])
    baseline.compare(row(1, other_settings="tensor_parallel=2", tensor_parallel=1))
    assert (baseline.num_compared, len(baseline.new)) == (1, 0)
    assert baseline.is_matched


def test_the_name_of_the_model_is_no_part_of_a_row() -> None:
    baseline = Baseline([row(1, model="checkout-1")])
    baseline.compare(row(1, model="checkout-2"))
    assert baseline.is_matched


def test_rows_that_ask_the_same_are_told_apart_by_their_order() -> None:
    baseline = Baseline([row(1), row(2)])
    baseline.compare(row(1))
    assert [each["peak_bytes"] for each in baseline.gone] == [2]
    baseline.compare(row(3))
    assert [(move.before_bytes, move.after_bytes) for move in baseline.moves] == [(2, 3)]
    baseline.compare(row(4))
    assert [each["peak_bytes"] for each in baseline.new] == [4]


def test_nothing_compared_is_no_match() -> None:
    assert not Baseline([]).is_matched


@pytest.mark.parametrize(
    ("now", "params", "changed"),
    [
        pytest.param(Origin(version="1", fingerprint="a"), 5, False, id="the same"),
        pytest.param(Origin(version="1", fingerprint="b"), 5, True, id="another shape"),
        pytest.param(Origin(version="2", fingerprint="b"), 5, False, id="another memplan"),
        pytest.param(Origin(version="2", fingerprint="b"), 6, True, id="more parameters"),
    ],
)
def test_another_model_is_no_match(now: Origin, params: int, changed: bool) -> None:
    baseline = Baseline([row(1, num_params=5)], origin=Origin(version="1", fingerprint="a"))
    baseline.compare(row(1, num_params=params))
    baseline.judge_model(now)
    assert (baseline.shape_changed, baseline.is_matched) == (changed, not changed)


def test_the_lines_name_what_moved() -> None:
    baseline = Baseline([row(2**30), row(2**30, zero_stage=3)])
    baseline.compare(row(2**31, "OOM"))
    first, second, third = baseline_lines(baseline, name="old.json", tolerance=0.02)
    assert first == "Since old.json: 1 of 1 rows moved, 1 for the worse beyond 2 %; 0 new, 1 gone"
    assert second == "! stage 2, on g: peak 1.00 -> 2.00 GiB (+100.00 %), fits -> OOM"
    assert third == "- stage 3, on g: only in the baseline"
