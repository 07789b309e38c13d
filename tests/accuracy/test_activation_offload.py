"""Activations that go to CPU RAM between the passes, against runs of the code that sends them.

The records come from PyTorch's own CUDA build: ``save_on_cpu``, and ``OffloadActivations`` as TRL 1.16 and
torchtune 0.6.1 have it, over models, lengths and precisions that were drawn at random.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.comparison import Comparison, remember

BARS = {"requested_peak": 0.01, "reserved_peak": 0.02, "pinned": 0.003}
"""Worst relative errors: of the peak, of segments, and of page-locked CPU RAM."""


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    setup = TrainingSetup(engine="ddp", **record["setup"])  # type: ignore[arg-type]
    answer = estimate(load_model(record["config"]), setup, load_gpu("h100-sxm-80gb"))
    return {
        "requested_peak": answer.peak_bytes,
        "reserved_peak": answer.reserved_bytes,
        "pinned": answer.account.host.held_bytes,
    }


def test_runs_that_offload(
    checkout: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((checkout / "tests" / "data" / "activation_offload.json").read_text())
    comparison = Comparison()
    for record in data["runs"]:
        comparison.add(record, record["real"], predict)
    with capsys.disabled():
        sys.stdout.write(f"\nactivation_offload.json: {comparison.table()}\n")
    assert not comparison.refused
    for name, bar in BARS.items():
        assert comparison.worst(name)[0] <= bar, (name, comparison.worst(name))
    remember(
        "Activations in CPU RAM",
        {name: comparison.row(name) for name in BARS},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("requested_peak"),
        found=[comparison],
    )
