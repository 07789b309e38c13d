"""The loop of training steps, with an engine that only counts."""

import contextlib
from types import SimpleNamespace

import pytest

from memplan.training.setup import TrainingSetup

pytest.importorskip("torch")

from memplan.verify.on_torch.engines import Trainer
from memplan.verify.on_torch.steps import train


class _Silent:
    def enter(self, part: str) -> None: ...
    def held(self) -> None: ...
    def ended(self) -> None: ...


def test_an_engine_hears_of_every_micro_batch() -> None:
    """DeepSpeed's ``step()`` is called behind each: by it the engine counts to the one that steps."""
    called: list[str] = []
    trainer = Trainer(
        forward=lambda _: SimpleNamespace(loss=None),
        backward=lambda _: called.append("backward"),
        step=lambda: called.append("step"),
        unsynchronised=contextlib.nullcontext,
        passed=lambda: called.append("passed"),
    )
    train(trainer, {}, TrainingSetup(gradient_accumulation_steps=3), _Silent(), 2)
    assert called == 2 * ["backward", "passed", "backward", "passed", "backward", "step"]
