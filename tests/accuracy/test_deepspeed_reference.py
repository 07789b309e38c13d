"""One rank of DeepSpeed ZeRO 0-3, against every record of ``deepspeed.jsonl``, and of fresh cases."""

from pathlib import Path

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.deepspeed_records import predict

# figure: (95th percentile, worst) that the relative error may reach
BARS = {
    "before": (7.5e-5, 0.0006),
    "after_step": (7.5e-5, 0.0006),
    "peak_init": (1.8e-6, 4e-6),
    "peak_forward": (0.000015, 0.00004),
    "peak_backward": (1.5e-5, 3.5e-5),
    "peak_step": (0.0001, 0.001),
    "peak": (1.5e-5, 3.5e-5),
    "cpu_peak_init": (6e-7, 6e-7),
    "cpu_after_step": (5e-9, 4e-8),
}
"""No more than five times what is reached: what is left is a small model's counters."""

MORE_BARS = {
    "before": 0.0002,
    "after_step": 0.0002,
    "peak_init": 5.5e-6,
    "peak_forward": 0.0001,
    "peak_backward": 0.0015,
    "peak_step": 0.002,
    "peak": 0.00005,
    "cpu_peak_init": 1.2e-6,
    "cpu_after_step": 6e-8,
}
"""The same for each record of ``deepspeed_more.jsonl``: other models, keys of ds_config one by one."""


def compare(records: Path) -> Comparison:
    comparison = Comparison()
    for record in read_records(records):
        comparison.add(
            {**record, "model_type": record["settings"]["model"]}, record["bytes"], predict
        )
    return comparison


@pytest.mark.reference
def test_deepspeed(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(reference_dir / "deepspeed.jsonl")
    with capsys.disabled():
        print(f"\ndeepspeed.jsonl: {comparison.table()}")
    assert not comparison.refused
    for name, (p95, worst) in BARS.items():
        assert comparison.quantile(name, 0.95) <= p95, name
        assert comparison.worst(name)[0] <= worst, comparison.worst(name)
    remember(
        "DeepSpeed ZeRO 0-3",
        {name: comparison.row(name) for name in ("before", "peak_init", "peak", "cpu_after_step")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak"),
        found=[comparison],
    )


@pytest.mark.reference
def test_fresh_cases(reference_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare(reference_dir / "deepspeed_more.jsonl")
    with capsys.disabled():
        print(f"\ndeepspeed_more.jsonl: {comparison.table()}")
    assert not comparison.refused
    for name, worst in MORE_BARS.items():
        assert comparison.worst(name)[0] <= worst, comparison.worst(name)
