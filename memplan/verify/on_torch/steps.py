"""The loop: some training steps, of whose parts a meter takes note."""

import gc
from collections.abc import Mapping
from typing import Any, Protocol

from memplan.training.setup import TrainingSetup
from memplan.verify.on_torch.engines import Trainer


class Meter(Protocol):
    """Takes note of what is held, part by part."""

    def enter(self, part: str) -> None:
        """A part begins: load, forward, backward or step."""

    def held(self) -> None:
        """All is loaded, or a step is over, and the next has not begun."""

    def ended(self) -> None:
        """The last part of a step was asked for."""


def train(
    trainer: Trainer, batch: Mapping[str, Any], setup: TrainingSetup, meter: Meter, num_steps: int
) -> None:
    """Train on the same batch again and again."""
    passes = setup.gradient_accumulation_steps
    for _ in range(num_steps):
        gc.collect()
        meter.held()
        for number in range(passes):
            if number < passes - 1:
                with trainer.unsynchronised():
                    _pass(trainer, batch, setup, meter)
                trainer.passed()
            else:
                _pass(trainer, batch, setup, meter)
        meter.enter("step")
        trainer.step()
        meter.ended()
    gc.collect()
    meter.held()


def _pass(trainer: Trainer, batch: Mapping[str, Any], setup: TrainingSetup, meter: Meter) -> None:
    meter.enter("forward")
    outputs = trainer.forward(batch)
    loss = outputs.loss
    if not setup.outputs_held:
        del outputs
    meter.enter("backward")
    trainer.backward(loss)
