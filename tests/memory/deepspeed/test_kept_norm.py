"""The norm of all gradients, which DeepSpeed's optimizers keep for whoever asks (``_global_grad_norm``)."""

from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.memory.replaying.ledger import Part
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_there_until_the_next_step_ends(stage: int) -> None:
    """The engine has the optimizer's last one until it asks for the next (engine.py, ``_take_model_step``): so do ten
    recorded steps of PyTorch 2.13's CUDA build with DeepSpeed 0.19.8 (stage 1: Cohere; stage 3: BLOOM)."""
    setup: dict[str, Any] = {
        "engine": "deepspeed",
        "zero_stage": stage,
        "num_gpus": 2,
        "seq_len": 64,
    }
    run = named_run(estimate(load_model("gpt2"), TrainingSetup(**setup), None, rank=0))
    events = run.ledger.events
    norms = [block for block, label in run.labels.items() if label.name == "norm of all gradients"]
    assert {run.labels[block].part for block in norms} == {Part.STEP}
    assert {events[block] for block in norms} == {512}
    gone = [events.index(~block) for block in norms[:-1]]
    assert all(end > following for end, following in zip(gone, norms[1:], strict=True))
    assert {run.labels[block].part for block in norms} == {Part.STEP}
    assert ~norms[-1] not in events
