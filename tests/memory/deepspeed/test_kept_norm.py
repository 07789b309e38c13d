"""The norm of all gradients, which DeepSpeed's optimizers keep for whoever asks (``_global_grad_norm``)."""

from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.memory.replaying.ledger import Part
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup


@pytest.mark.parametrize(("stage", "goes_first"), [(1, True), (2, True), (3, False)])
def test_it_is_there_until_the_next_step(stage: int, goes_first: bool) -> None:
    """Stages 1 and 2 forget the last one before they make the next, the third does after."""
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
    assert [end < following for end, following in zip(gone, norms[1:], strict=True)] == [
        goes_first
    ] * len(gone)
    assert ~norms[-1] not in events
