"""Accumulation, averaged weights and DPO on one GPU, against the records of ``jobs.jsonl``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.jobs_records import is_compiled, predict, truth_of

NUMBERS = json.loads((Path(__file__).parents[1] / "data" / "jobs.json").read_text())
BARS = {
    "requested_before": 0.00015, "requested_peak": 0.00005, "reserved_peak": 0.0,
    # ``max_memory_allocated`` counts a block's unsplit rest too.
    "peak_forward": 0.006, "peak_backward": 0.006,
}  # fmt: skip
"""No more than five times what is reached."""


@pytest.mark.reference
def test_jobs(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison()
    for record in read_records(reference_dir / "jobs.jsonl"):
        truth = truth_of(record)
        if is_compiled(record):
            del truth["reserved_peak"]  # kernels were tried out in buffers of full size first
        found.add(record, truth, predict)
    with capsys.disabled():
        sys.stdout.write(f"\njobs.jsonl: {found.table()}\n")
    assert not found.refused
    assert found.num_records == 11
    for name, bar in BARS.items():
        assert found.worst(name)[0] <= bar, found.worst(name)
    remember(
        "jobs of several models",
        {name: found.row(name) for name in ("requested_peak", "reserved_peak")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("requested_peak"),
        found=[found],
    )


@pytest.mark.parametrize("record", NUMBERS, ids=lambda record: record["id"])
def test_some_of_their_numbers(record: dict[str, Any]) -> None:
    figures, truth = predict(record), truth_of(record)
    for name, bar in BARS.items():
        assert figures[name] == pytest.approx(truth[name], rel=bar), name
