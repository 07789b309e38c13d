"""FSDP2, FSDP1 and DDP against real runs of torch 2.13 on a fake process group.

``tests/data/sharding.json`` holds a small model, a setup and the bytes that rank 0's allocator counted
in the second step, for every mechanism: strategies, units, prefetches, formats, accumulation.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import account_of, figures_of

RECORDS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "sharding.json").read_text()
)
TOLERANCE = 0.0005
"""What remains is the rounding of single tensors to 512 bytes."""
SMALL_BYTES = 4096


@pytest.mark.parametrize("case", [pytest.param(each, id=each["id"]) for each in RECORDS["cases"]])
def test_every_peak_is_the_real_one(case: dict[str, Any]) -> None:
    setup = TrainingSetup(**case["setup"], kernel_scratch=False)
    figures = figures_of(account_of(RECORDS["models"][case["model"]], setup))
    for name, truth in case["truth"].items():
        assert figures[name] == pytest.approx(truth, rel=TOLERANCE, abs=SMALL_BYTES), name
