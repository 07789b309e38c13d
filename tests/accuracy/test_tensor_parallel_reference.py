"""DTensor's tensor parallelism, alone and under FSDP2, against every record of it."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.split_records import predict_split
from tests.batches import positions_in_tables

# figure: (95th percentile, worst) that the relative error may reach
BARS = {
    "bytes_before": (9.5e-6, 2.8e-5),
    "activations": (0.0, 0.0),
    "peak_forward": (4.3e-5, 4.3e-5),
    "peak_backward": (0.0001, 0.0002),
    "peak_step": (7e-6, 1.9e-5),
    "peak": (0.0001, 0.0002),
}
"""Far below what is asked for (before 0.05 %, activations 0.5 %, peaks 1 and 3 %): all that is missing
are numbers of a few bytes a token, and the optimizer's counters."""
SECTIONS = {"tensor_parallel": "Tensor parallel", "fsdp_tensor_parallel": "FSDP2 x tensor parallel"}


@pytest.mark.reference
@pytest.mark.parametrize("name", SECTIONS)
def test_every_record(
    reference_dir: Path,
    name: str,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    comparison = Comparison()
    with positions_in_tables():
        for record in read_records(reference_dir / f"{name}.jsonl"):
            comparison.add(record, record["bytes"], predict_split)
    with capsys.disabled():
        sys.stdout.write(f"\n{name}.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for figure, (p95, worst) in BARS.items():
        assert comparison.quantile(figure, 0.95) <= p95, figure
        assert comparison.worst(figure)[0] <= worst, comparison.worst(figure)
    remember(
        SECTIONS[name],
        {figure: comparison.row(figure) for figure in ("bytes_before", "activations", "peak")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak"),
        found=[comparison],
    )


def own_records(checkout: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(
        (checkout / "tests" / "data" / "tensor_parallel.json").read_text()
    )
    return records


def test_own_records(checkout: Path) -> None:
    """Fresh cases: other families, tied tables, biases, several sequences, other optimizers."""
    for record in own_records(checkout):
        given = record.get("positions") == "in tables"
        with positions_in_tables() if given else nullcontext():
            predicted = predict_split(record)
        for figure in BARS.keys() - {"peak"}:
            truth = record["bytes"][figure]
            assert abs(predicted[figure] - truth) <= 1e-4 * truth, (record["settings"], figure)
