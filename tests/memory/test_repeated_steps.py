"""A step that all later ones are like is played out once."""

from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import MIB
from tests.memory.test_tally import ENGINES, MODELS

NUM_STEPS = 5
WAYS: dict[str, dict[str, Any]] = {
    **ENGINES,
    "megatron": {"engine": "megatron", "num_gpus": 4, "tensor_parallel": 2},
    "pipeline": {
        "engine": "fsdp", "num_gpus": 4, "pipeline_parallel": 2, "gradient_accumulation_steps": 4,
    },
    "Megatron's pipeline": {
        "engine": "megatron", "num_gpus": 6, "pipeline_parallel": 3, "gradient_accumulation_steps": 9,
        "engine_options": {"use_distributed_optimizer": True},
    },
    "looped pipeline": {
        "engine": "megatron", "num_gpus": 2, "pipeline_parallel": 2, "virtual_stages": 2,
        "pipeline_schedule": "interleaved-1f1b", "gradient_accumulation_steps": 12,
    },
    "two models": {"engine": "fsdp", "num_gpus": 4, "job": "dpo"},
    "generated": {"engine": "deepspeed", "zero_stage": 2, "num_gpus": 4, "job": "grpo:reference=same"},
    "scaled": {"precision": "fp16-amp", "gradient_accumulation_steps": 3},
    "evaluated": {"evaluation": "4:batches_kept=3"},
    "moved": {"optimizer": "bnb-adamw-8bit", "adapter": {"lora": 4}},
}  # fmt: skip


class PlayedOut(Ledger):
    """A ledger whose steps are all played out."""

    __slots__ = ()

    def recurs(self) -> bool:
        return False


def run_of(fields: dict[str, Any], ledger: Ledger, *, num_steps: int) -> Ledger:
    config, task = MODELS["gpt2"]
    resolved = TrainingSetup(**{"seq_len": 64, **fields}).resolve()
    given = prepared(load_model(config, task), resolved, None).rank_input
    program_of(given, ledger, workspace_bytes=MIB).run(num_steps=num_steps)
    return ledger


def again(ledger: Ledger, num_steps: int) -> tuple[list[int], dict[int, int]]:
    """The events of a run, with its last step as often as makes up so many steps."""
    events, streams, cycle = [*ledger.events], {**ledger.streams}, ledger.cycle
    assert cycle is not None
    last = cycle.start
    for _ in range(num_steps - len(ledger.steps)):
        start = len(events)
        for number in range(cycle.start, len(ledger.events)):
            event, place = ledger.events[number], len(events)
            if event < 0:
                own = ~event >= cycle.start
                event = ~(~event - cycle.start + start if own else ~event - cycle.before + last)
            elif number in ledger.streams:
                streams[place] = ledger.streams[number]
            events.append(event)
        last = start
    return events, streams


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_what_they_would_be(way: str) -> None:
    """In the order and on the streams; nor does it matter to a card with much room or little."""
    found = run_of(WAYS[way], Ledger(), num_steps=NUM_STEPS)
    whole = run_of(WAYS[way], PlayedOut(), num_steps=NUM_STEPS)
    assert found.cycle is not None
    assert len(found.steps) < NUM_STEPS
    assert again(found, NUM_STEPS) == (whole.events, whole.streams)


@pytest.mark.parametrize(("allocator", "most"), [("default", 4), ("expandable", 16)])
def test_of_many_micro_batches_some_are_played_out(allocator: str, most: int) -> None:
    """Pages creep on from one to the next where segments expand; elsewhere the fifth asks for what the fourth did."""

    def num_events(count: int) -> int:
        fields = {"gradient_accumulation_steps": count, "allocator": allocator}
        return len(run_of(fields, PlayedOut(), num_steps=1).events)

    assert num_events(most - 1) < num_events(most) == num_events(most + 3)
