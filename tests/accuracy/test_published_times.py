"""Step times that others published, as the shared reference says them: its rows were never all fitted to."""

import sys

import pytest

from benchmarks.step_times import (
    NEAR,
    ROWS,
    Row,
    figures,
    groups,
    is_fitted,
    published_rows,
    said,
    table,
)
from memplan.errors import MemplanError
from tests.accuracy.comparison import remember_times

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="the shared reference is not here")
MEDIAN, SHARE_NEAR, SHARE_INSIDE, UNFITTED = 0.12, 0.90, 0.80, 1.3
"""Of all rows: median, within 30 %, within the printed range; and the unfitted half's median over the other's."""


def test_published_step_times(
    capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    rows = []
    for row in published_rows():
        try:
            rows.append(said(row))
        except MemplanError:
            continue
    assert len(rows) >= 100
    found = figures(rows)
    fitted = figures([each for each in rows if each.is_fitted])
    unfitted = figures([each for each in rows if not each.is_fitted])
    assert found is not None
    assert fitted is not None
    assert unfitted is not None
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(table(rows, {})) + "\n")
    remember_times(groups_of(rows), update=pytestconfig.getoption("--update-accuracy"))
    assert found.median <= MEDIAN
    assert found.near >= SHARE_NEAR, f"within {NEAR:.0%}"
    assert found.inside >= SHARE_INSIDE
    assert unfitted.median <= UNFITTED * fitted.median


def groups_of(rows: list[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """What the page of accuracy says of each group of rows: no row of another's file by itself."""
    found = {}
    for name, own in groups(rows).items():
        halves = {
            "fitted": [each for each in own if each.is_fitted],
            "unfitted": [each for each in own if not each.is_fitted],
        }
        found[name] = {half: told for half, kept in halves.items() if (told := _rounded(kept))}
    return found


def _rounded(rows: list[Row]) -> dict[str, float] | None:
    found = figures(rows)
    if found is None:
        return None
    return {
        "steps": found.count, "median": round(found.median, 3), "p90": round(found.p90, 3),
        "near": round(found.near, 2), "inside": round(found.inside, 2),
    }  # fmt: skip


def test_halves_are_for_good() -> None:
    """Moving a row to the other half would make fitted figures of unfitted ones."""
    assert [row_id for row_id in range(1, 25) if is_fitted(row_id)] == [
        1, 4, 5, 10, 11, 16, 18, 19, 22, 24,
    ]  # fmt: skip
