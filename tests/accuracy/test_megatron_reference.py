"""Megatron-core's GPTModel, local layers, against every record of it and cases of our own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.megatron_records import predict_megatron

# figure: (95th percentile, worst) that the relative error may reach
BARS = {
    "bytes_before": (0.0002, 0.0002),
    "activations_per_layer": (0.0, 0.0),
    "activations": (0.0, 0.0),
    "peak_forward": (0.0002, 0.0002),
    "peak_backward": (0.005, 0.009),
    "peak_step": (0.0002, 0.0002),
    "peak": (0.005, 0.009),
}
"""Asked for are 0.3 % of a layer's activations and 1.5 % of the peak. Two records' backward peaks, of
ungrouped Llama layers without recomputation, lie 0.4 and 0.9 % below: fake tensors free earlier there than
PyTorch's CUDA build, which gives memplan's figure."""


@pytest.mark.reference
def test_every_record(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison()
    for record in read_records(reference_dir / "megatron.jsonl"):
        comparison.add(record, record["bytes"], predict_megatron)
    with capsys.disabled():
        sys.stdout.write(f"\nmegatron.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for figure, (p95, worst) in BARS.items():
        assert comparison.quantile(figure, 0.95) <= p95, figure
        assert comparison.worst(figure)[0] <= worst, comparison.worst(figure)
    remember(
        "Megatron",
        {
            figure: comparison.row(figure)
            for figure in ("bytes_before", "activations_per_layer", "peak")
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak"),
        found=[comparison],
    )


def own_records(checkout: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(
        (checkout / "tests" / "data" / "megatron.json").read_text()
    )
    return records


def test_own_records(checkout: Path) -> None:
    """Fresh cases of Megatron-core 0.16.1 on PyTorch's CUDA build, less workspaces and batch.

    Its DDP with and without the distributed optimizer, buckets, other sizes, recomputation of chunks, of
    the first layers, of attention and network.
    """
    for record in own_records(checkout):
        predicted = predict_megatron(record)
        for figure, truth in record["bytes"].items():
            # The rotary module's angles are counted from the start, and made in the first pass.
            bar = 2e-3 if figure == "peak_load" else 2e-4
            assert abs(predicted[figure] - truth) <= bar * truth, (record["settings"], figure)
