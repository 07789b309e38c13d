"""One rank of FSDP2, against every record of ``fsdp.jsonl``."""

import sys
from pathlib import Path

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.sharding_records import predict_fsdp

# figure: (95th percentile, worst) that the relative error may reach
BARS = {
    "bytes_before": (3.5e-5, 0.00005),
    "peak_forward": (1e-6, 0.00005),
    "peak_backward": (1e-6, 2e-6),
    "peak_step": (0.00002, 4.6e-5),
    "peak": (1e-6, 2e-6),
}
"""No more than five times what is reached, all of it numbers of a few bytes a tensor."""
FRESH_BARS = {
    "bytes_before": 1e-6, "peak_forward": 1e-6, "peak_backward": 1e-6, "peak_step": 1e-6, "peak": 1e-6,
}  # fmt: skip
"""The same of records that came later, the worst alone."""


def compare(records: Path) -> Comparison:
    comparison = Comparison()
    for record in read_records(records):
        comparison.add(record, record["truth"], predict_fsdp)
    return comparison


@pytest.mark.reference
def test_fsdp(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(reference_dir / "fsdp.jsonl")
    with capsys.disabled():
        sys.stdout.write(f"\nfsdp.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for name, (p95, worst) in BARS.items():
        assert comparison.quantile(name, 0.95) <= p95, name
        assert comparison.worst(name)[0] <= worst, comparison.worst(name)
    remember(
        "FSDP2",
        {name: comparison.row(name) for name in ("bytes_before", "peak")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak"),
        found=[comparison],
    )


@pytest.mark.reference
def test_fresh_cases(reference_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare(reference_dir / "fsdp_more.jsonl")
    with capsys.disabled():
        sys.stdout.write(f"\nfsdp_more.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for name, worst in FRESH_BARS.items():
        assert comparison.worst(name)[0] <= worst, comparison.worst(name)
