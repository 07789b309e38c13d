"""DDP and DeepSpeed against real runs, with the kernels that users get.

``tests/data/pinned_runs.json`` holds what PyTorch's own CUDA build asked its allocator for. Each case
pins a rule that the other records, made with larger buffers around it, cannot see.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import Estimate, estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "pinned_runs.json").read_text()
)
TOLERANCE = 1e-4
"""The runs count what was asked for; memplan rounds each tensor up to the allocator's 512 bytes."""


def answer_to(case: dict[str, Any]) -> Estimate:
    config = DATA["model"] | {"num_hidden_layers": case["num_layers"]}
    model = load_model(config, case["task"])
    gpu = load_gpu("a100-80gb")
    return estimate(model, TrainingSetup(**case["setup"]), gpu, rank=case.get("rank"))


@pytest.mark.parametrize("case", [pytest.param(each, id=each["id"]) for each in DATA["cases"]])
def test_as_the_real_run(case: dict[str, Any]) -> None:
    answer = answer_to(case)
    figures = {name: phase.peak_bytes for name, phase in answer.phases.items()}
    figures |= {"held": answer.held_bytes, "peak": answer.peak_bytes}
    for name, truth in case["truth"].items():
        assert figures[name] == pytest.approx(truth, rel=TOLERANCE), name
