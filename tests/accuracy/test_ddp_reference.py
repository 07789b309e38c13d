"""One rank of DDP, against the records of ``ddp.jsonl``."""

import sys
from pathlib import Path

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.sharding_records import predict_ddp

FIGURES = ("before", "peak_forward", "peak_backward", "peak_step", "peak", "peak_ddp_init")
BARS = {"peak_ddp_init": 1e-6, "before": 2.5e-5}
"""Of figures that come nearer than the others, or not as near: no more than five times what is reached."""


def compare(records: Path) -> Comparison:
    comparison = Comparison()
    for record in read_records(records):
        measured = dict(record["bytes"])
        if record["settings"]["lora_r"]:
            # The fake process group sends parameters without the copies that DDP's C++ makes of them.
            # They are more than an adapter's buckets, and less than the whole model's.
            del measured["peak_ddp_init"]
        comparison.add({**record, "model_type": record["settings"]["model"]}, measured, predict_ddp)
    return comparison


@pytest.mark.reference
def test_ddp(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(reference_dir / "ddp.jsonl")
    with capsys.disabled():
        sys.stdout.write(f"\nddp.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for name in FIGURES:
        assert comparison.worst(name)[0] <= BARS.get(name, 1.8e-5), comparison.worst(name)
    remember(
        "DDP",
        {name: comparison.row(name) for name in ("before", "peak")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak"),
        found=[comparison],
    )


@pytest.mark.reference
def test_fresh_cases(reference_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare(reference_dir / "ddp_more.jsonl")
    with capsys.disabled():
        sys.stdout.write(f"\nddp_more.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for name in FIGURES:
        assert comparison.worst(name)[0] <= 1e-6, comparison.worst(name)
