"""Which units of FSDP are whole between the parts of a step: with gradients to reduce or not, trained or frozen."""

from typing import Any

import pytest

from memplan.estimator.job import Job
from memplan.memory.account import ComponentKind
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.test_tally import MODELS

UNITS = 10
"""Nine layers and the root."""
WEIGHTS = 9 * 9 + 3
"""FSDP2 has each weight by itself."""


class WholeLedger(Ledger):
    """Notes how many blocks of whole weights there are where a part of the run begins."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: set[int] = set()
        self.found: list[tuple[Part, int]] = []

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> int:
        block = super().allocate(num_bytes, stream, kind, name)
        if kind is ComponentKind.GATHERED_PARAMETERS:
            self.whole.add(block)
        return block

    def enter(self, part: Part, step: int = 0) -> None:  # noqa: ARG002
        gone = {~event for event in self.events if event < 0}
        self.found.append((part, len(self.whole - gone)))


@pytest.mark.parametrize("frozen", ["", "layers.0-1", "embeddings"])
@pytest.mark.parametrize(
    ("engine", "strategy", "before_backward", "before_forward"),
    [
        # torch/distributed/fsdp/_runtime_utils.py: the root alone is not freed in forward (_root_pre_forward), and
        # `_should_free_in_backward` lets go where gradients are reduced or the strategy does so after each forward.
        ("fsdp1", "full_shard", 1, 0),
        ("fsdp1", "shard_grad_op", UNITS, UNITS),
        # torch/distributed/fsdp/_fully_shard: `reshard_after_backward` stays on while gradients wait.
        ("fsdp", "full_shard", 0, 0),
        ("fsdp", "shard_grad_op", WEIGHTS, 0),
    ],
)  # fmt: skip
def test_units_between_micro_batches(
    engine: Any, strategy: Any, before_backward: int, before_forward: int, frozen: Any
) -> None:
    setup = TrainingSetup(
        engine=engine, fsdp_strategy=strategy, num_gpus=4, seq_len=96,
        gradient_accumulation_steps=3, freeze=frozen or None,
    )  # fmt: skip
    given = Job.of(load_model(*MODELS["llama"]), setup, None).given
    ledger = WholeLedger()
    program = program_of(given, ledger, workspace_bytes=0, rank=0)
    program.start()
    program.train(0, num_micro_batches=3)
    parts = [each for each in ledger.found if each[0] in (Part.FORWARD, Part.BACKWARD, Part.STEP)]
    waits = (Part.FORWARD, before_forward), (Part.BACKWARD, before_backward)
    # The first one stands twice: as the run begins, and as its first micro-batch does.
    assert parts[1:] == [(Part.FORWARD, 0), waits[1], *waits, *waits, (Part.STEP, 0)]
