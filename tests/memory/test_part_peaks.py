"""The peaks of a run's parts are those of its account and of its replay."""

import pytest

from memplan.api import estimate
from memplan.estimator.measured import predicted_parts
from memplan.training.setup import TrainingSetup


@pytest.mark.parametrize(
    "values",
    [
        {"checkpointing": "full"},
        {"num_gpus": 8, "engine": "fsdp"},
        {"num_gpus": 8, "zero_stage": 3},
        {"allocator": "expandable"},
    ],
    ids=["one GPU", "FSDP2", "ZeRO-3", "expandable"],
)
def test_agree_with_the_estimate(values: dict[str, object]) -> None:
    answer = estimate("gpt2", TrainingSetup(seq_len=256, **values), gpu="a100-80gb")  # type: ignore[arg-type]
    found = predicted_parts(answer)
    assert found.keys() == {"load", "forward", "backward", "step"}
    for part, peaks in found.items():
        assert peaks.requested_bytes == answer.phases[part].peak_bytes
        assert peaks.requested_bytes <= peaks.allocated_bytes <= peaks.reserved_bytes
    steps = [found[part] for part in ("forward", "backward", "step")]
    assert max(each.allocated_bytes for each in steps) <= answer.run.peaks.allocated_bytes
    assert max(each.reserved_bytes for each in steps) == answer.reserved_bytes
