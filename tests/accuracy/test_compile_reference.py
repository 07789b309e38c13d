"""torch.compile on one GPU, against every record of ``compile.jsonl``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.compile_records import predict_compile, truth_of

PEAKS = ("peak_forward", "peak_backward", "requested_peak")
NUMBERS = json.loads((Path(__file__).parents[1] / "data" / "compile.json").read_text())


@pytest.mark.reference
def test_cuda_kernels(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison()
    for record in read_records(reference_dir / "compile.jsonl"):
        found.add(record, truth_of(record), predict_compile)
    with capsys.disabled():
        sys.stdout.write(f"\ncompile.jsonl: {found.table()}\n")
    assert not found.refused
    # Of whole blocks, which a request may leave a part of unused.
    assert found.quantile("held_by_forward", 0.95) <= 0.01
    assert found.worst("held_by_forward")[0] <= 0.02
    for name in PEAKS:
        assert found.quantile(name, 0.95) <= 0.006, name
        # T5 as one graph, whose kernels inductor orders otherwise.
        assert found.worst(name)[0] <= 0.025, found.worst(name)
    remember(
        "torch.compile",
        {"held": found.row("held_by_forward"), "peak": found.row("requested_peak")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("requested_peak"),
        found=[found],
    )


@pytest.mark.parametrize("record", NUMBERS["records"], ids=lambda record: record["id"])
def test_recorded_figures(record: dict[str, Any]) -> None:
    figures, truth = predict_compile(record), truth_of(record)
    assert figures["held_by_forward"] == pytest.approx(truth["held_by_forward"], rel=0.01)
    for name in PEAKS:
        assert figures[name] == pytest.approx(truth[name], rel=0.006), name
