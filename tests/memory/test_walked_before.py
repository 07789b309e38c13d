"""Cards whose tapes share segments: each finds what it would have found alone."""

from typing import Any

import pytest

from memplan.estimator.recording import tape_options
from memplan.graph.model import record_model
from memplan.memory.passes import StepPasses
from memplan.memory.step import StepWalk
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

CARDS = ("h100-80gb", "a100-80gb", "t4", "h100-80gb")


def looks(passes: StepPasses) -> list[object]:
    """Every event and every level, blocks by the order in which they come."""
    numbers: dict[object, int] = {}

    def told(events: Any) -> list[object]:
        return [(numbers.setdefault(key, len(numbers)), size) for key, size in events]

    return [
        [(each.start, each.peak, told(each.profile.events)) for each in passes.forward],
        [
            (each.repeats, each.start, each.change, [told(part.events) for part in each.intervals])
            for each in passes.backward
        ],
        [[(part.peak, part.end) for part in each.intervals] for each in passes.backward],
        passes.after_backward,
    ]


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        pytest.param("t5-small", {"seq_len": 512}, id="tables that are sorted"),
        pytest.param("gpt2", {"seq_len": 4096, "micro_batch_size": 8}, id="sums that are split"),
        pytest.param("gpt2", {"seq_len": 512, "checkpointing": "full"}, id="run again"),
    ],
)
def test_a_card_after_others_finds_what_it_finds_alone(model: str, asked: dict[str, Any]) -> None:
    spec = load_model(model)
    written: list[Any] = []
    shared = 0
    for card in CARDS:
        gpu = load_gpu(card)
        setup = TrainingSetup(**asked, precision="fp16-amp").resolve(512, has_bf16=gpu.has_bf16)
        options = tape_options(setup, gpu)
        alone = record_model(spec, options)
        found = (each.as_on(options) for each in written)
        tape = next((each for each in found if each is not None), None)
        shared += tape is not None
        if tape is None:
            tape = record_model(spec, options)
            written.append(tape)
        assert looks(StepWalk(tape).run()) == looks(StepWalk(alone).run()), card
    assert shared > 1
