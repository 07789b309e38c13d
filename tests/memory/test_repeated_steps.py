"""A step that is as the one before is written down again, and not followed where it changes nothing."""

import random
from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.allocator import CachingAllocator, replay
from memplan.memory.ledger import Ledger
from memplan.memory.programs import program_of
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
    "two models": {"engine": "fsdp", "num_gpus": 4, "job": "dpo"},
    "generated": {"engine": "deepspeed", "zero_stage": 2, "num_gpus": 4, "job": "grpo:reference=same"},
    "scaled": {"precision": "fp16-amp", "gradient_accumulation_steps": 3},
    "evaluated": {"evaluation": "4:batches_kept=3"},
    "moved": {"optimizer": "bnb-adamw-8bit", "adapter": {"lora": 4}},
}  # fmt: skip
NOT_REPEATED = ("zero3", "zero3, nothing kept", "zero3 offloaded")
"""One step leaves a block to the next."""


class PlayedOut(Ledger):
    """A ledger whose steps are all played out."""

    __slots__ = ()

    def repeat(self, start: int) -> bool:  # noqa: ARG002
        return False


def run_of(fields: dict[str, Any], ledger: Ledger, *, num_steps: int) -> Ledger:
    config, task = MODELS["gpt2"]
    resolved = TrainingSetup(**{"seq_len": 64, **fields}).resolve()
    given = prepared(load_model(config, task), resolved, None).rank_input
    program_of(given, ledger, workspace_bytes=MIB).run(num_steps=num_steps)
    return ledger


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_what_they_would_be(way: str) -> None:
    """In the order and on the streams; nor does it matter to a card with much room or little."""
    found = run_of(WAYS[way], Ledger(), num_steps=NUM_STEPS)
    whole = run_of(WAYS[way], PlayedOut(), num_steps=NUM_STEPS)
    assert bool(found.repeats) == (way not in NOT_REPEATED)
    assert found.events == whole.events
    assert found.streams == whole.streams
    roomy = replay(whole.events, whole.streams)
    assert replay(found.events, found.streams, found.repeats) == roomy
    for share in (0.2, 0.5, 0.8):
        most, least = roomy.reserved_bytes, roomy.allocated_bytes
        capacity = int(least + share * (most - least))
        assert replay(
            found.events, found.streams, found.repeats, capacity_bytes=capacity
        ) == replay(whole.events, whole.streams, capacity_bytes=capacity)


class Counting(CachingAllocator):
    """Counts what it follows."""

    __slots__ = ("followed",)

    def __init__(self) -> None:
        super().__init__()
        self.followed = 0

    def _follow(self, events: Any, *others: Any) -> int | None:
        self.followed += len(events)
        return super()._follow(events, *others)


def step(*sizes: int) -> list[int]:
    """Blocks that come in this order and go in the same."""
    return [*sizes, *(~number for number in range(len(sizes)))]


def repeated(first: list[int], num_steps: int) -> Ledger:
    ledger = Ledger()
    ledger.events += first
    for number in range(num_steps - 1):
        assert ledger.repeat(number * len(first))
    return ledger


def test_what_changes_nothing_is_followed_once() -> None:
    ledger = repeated(step(3 * MIB, 30 * MIB), num_steps=9)
    allocator = Counting()
    assert allocator.replay(ledger.events, ledger.streams, ledger.repeats) is None
    assert allocator.followed == 2 * 4
    assert allocator.peak_reserved * 512 == 50 * MIB


def test_what_leaves_more_behind_each_time_is_followed_to_the_end() -> None:
    first = [*step(3 * MIB, 30 * MIB), 2 * MIB]
    ledger = repeated(first, num_steps=30)
    assert replay(ledger.events, {}, ledger.repeats) == replay(ledger.events)
    assert replay(ledger.events, {}, ledger.repeats, capacity_bytes=80 * MIB).died_at is not None


def drawn(chance: random.Random) -> Ledger:
    """Something that stays or goes, then steps that are all the same and may leave something behind."""
    ledger = Ledger()
    for size in (30, 3, 60):
        block = ledger.allocate(size * MIB)
        if chance.random() < 0.7:
            ledger.free(block)
    start, there = len(ledger.events), []
    for _ in range(chance.randrange(2, 14)):
        if chance.random() < 0.08:
            ledger.empty_cache()
        elif there and chance.random() < 0.5:
            ledger.free(there.pop(chance.randrange(len(there))))
        else:
            stream = int(chance.random() < 0.2)
            there.append(ledger.allocate(chance.choice((1, 2, 3, 12, 25)) * MIB, stream))
    for block in there[chance.choice((0, 0, 1)) :]:
        ledger.free(block)
    for _ in range(6):
        last, start = start, len(ledger.events)
        assert ledger.repeat(last)
    return ledger


def test_what_is_not_followed_makes_no_difference() -> None:
    chance = random.Random(5)
    for number in range(150):
        ledger = drawn(chance)
        found = replay(ledger.events, ledger.streams, ledger.repeats)
        assert found == replay(ledger.events, ledger.streams), number
        capacity = chance.randrange(found.allocated_bytes, found.reserved_bytes + 1)
        found = replay(ledger.events, ledger.streams, ledger.repeats, capacity_bytes=capacity)
        assert found == replay(ledger.events, ledger.streams, capacity_bytes=capacity), number


def test_a_step_that_frees_what_came_before_it_is_not_repeated() -> None:
    ledger = Ledger()
    block = ledger.allocate(MIB)
    ledger.free(block)
    assert not ledger.repeat(1)
    assert not ledger.repeats
    assert ledger.repeat(0)
    assert ledger.events == [MIB, ~0, MIB, ~2]
