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
TOLERANCE = 0.002
"""Most are right to the byte; BART's backward peak is the furthest off."""
SMALL_BYTES = 4096


@pytest.mark.parametrize("case", [pytest.param(each, id=each["id"]) for each in RECORDS["cases"]])
def test_every_peak_is_the_real_one(case: dict[str, Any]) -> None:
    setup = TrainingSetup(**case["setup"], kernel_scratch=False)
    task = case.get("task", "causal-lm")
    figures = figures_of(account_of(RECORDS["models"][case["model"]], setup, task))
    for name, truth in case["truth"].items():
        assert figures[name] == pytest.approx(truth, rel=TOLERANCE, abs=SMALL_BYTES), name


@pytest.mark.parametrize(
    ("engine", "num_gpus", "truth"),
    [
        pytest.param("fsdp1", 8, 1_809_440_256, id="fsdp1-8"),
        pytest.param("fsdp1", 2, 1_877_082_624, id="fsdp1-2"),
        pytest.param("fsdp", 1, 2_130_821_632, id="fsdp2-1"),
    ],
)
def test_sharding_a_model_that_lies_on_the_gpu(engine: str, num_gpus: int, truth: int) -> None:
    setup = TrainingSetup(
        engine=engine,  # type: ignore[arg-type]
        num_gpus=num_gpus,
        seq_len=32,
        engine_options={"init_device": "cuda"},
    )
    account = account_of(RECORDS["models"]["a"], setup)
    assert account.phases[0].peak_bytes == pytest.approx(truth, rel=5e-6)
