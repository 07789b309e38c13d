"""What each optimizer's own package asks the allocator for in its first two steps, block by block.

States alone are compared elsewhere; here everything that an update makes is, when it comes and when it goes.
"""

import json
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.job import prepared
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.programs import program_of
from memplan.memory.programs.program import Program
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "optimizer_orders.json").read_text(encoding="utf-8")
)
"""Steps of a one-layer Llama; what is said of them stands in the file."""


def played(record: dict[str, Any]) -> list[list[int]]:
    """What is asked for when the optimizer is made and in its first two steps."""
    model = load_model(DATA["config"], "causal-lm")
    gpu = load_gpu(record.get("gpu", DATA["gpu"]))
    setup = TrainingSetup(
        seq_len=64, micro_batch_size=1, precision=record["precision"],
        optimizer=record["name"].partition("+")[0], optimizer_options=record["options"],
    )  # fmt: skip
    given = prepared(model, setup.resolve(model.context_length, has_bf16=True), gpu).rank_input
    ledger = Ledger()
    program = program_of(given, ledger, workspace_bytes=0)
    program.load()
    assert isinstance(program, Program)
    begin = len(ledger.events)
    program.make_optimizer()
    found = [in_units(ledger.events, begin)]
    for first in (True, False):
        for weight in program.weights:
            size = allocated_bytes(weight[0].numel, weight[0].dtype)
            program.gradients[weight] = ledger.allocate(size, 0, ComponentKind.GRADIENTS, "")
        begin = len(ledger.events)
        program.optimizer_step(first=first)
        found.append(in_units(ledger.events, begin))
        program.zero_grad()
    return found


def in_units(events: list[int], begin: int) -> list[int]:
    """As the file writes them: a block by its units, its end by how many events ago it came."""
    found: list[int] = []
    places: dict[int, int] = {}
    for number, event in enumerate(events[begin:], begin):
        if event >= 0:
            units = ceil_div(event, ALLOCATION_ROUNDING)
            if units >= DATA["least_units"]:
                places[number] = len(found)
                found.append(units)
        elif ~event in places:
            found.append(places[~event] - len(found))
    return found


def in_any_order(events: list[int]) -> list[tuple[int, int]]:
    """Blocks that come, and between them those that go, which leave the allocator as it is in any order."""
    found: list[tuple[int, int]] = []
    gone: list[tuple[int, int]] = []
    for place, event in enumerate(events):
        if event > 0:
            found += [*sorted(gone), (event, 0)]
            gone = []
        else:
            came = place + event
            age = sum(each == events[came] for each in events[:came])
            gone.append((-events[came], age))
    return [*found, *sorted(gone)]


def num_parted(ours: list[int], recorded: list[int]) -> int:
    """Events of both sides that the other does not have there."""
    sides = in_any_order(ours), in_any_order(recorded)
    blocks = SequenceMatcher(None, *sides, autojunk=False).get_matching_blocks()
    return sum(map(len, sides)) - 2 * sum(block.size for block in blocks)


@pytest.mark.parametrize(
    "record", DATA["records"], ids=lambda record: f"{record['name']}-{record['precision']}"
)
def test_order(record: dict[str, Any]) -> None:
    parted = [num_parted(*each) for each in zip(played(record), record["steps"], strict=True)]
    assert parted == record.get("parted", [0, 0, 0]), record.get("why")


def test_a_state_that_is_made_anew_is_there_once() -> None:
    """Shampoo binds ``momentum_buffer`` to what each step has come to."""
    model = load_model(DATA["config"], "causal-lm")
    setup = TrainingSetup(seq_len=64, precision="bf16", optimizer="shampoo")
    given = prepared(model, setup.resolve(model.context_length, has_bf16=True), None).rank_input
    ledger = Ledger()
    program = program_of(given, ledger, workspace_bytes=0)
    program.run(num_steps=4)
    begin, end = ledger.steps[-2:]
    step = ledger.events[begin:end]
    assert sum(each > 0 for each in step) == sum(each < 0 for each in step)
    assert ledger.cycle is not None


@pytest.mark.parametrize(
    ("optimizer", "gpu", "told"),
    [
        ("bnb-rmsprop", "a100-80gb", "bitsandbytes has no RMSprop of bf16 gradients; choose"),
        ("bnb-rmsprop-8bit", "a100-80gb", "gradients for tensors below min_8bit_size"),
        (
            "torchao-adamw-fp8",
            "a100-80gb",
            "needs compute capability 8.9, and a100-sxm4-80gb has 8.0",
        ),
    ],
)
def test_what_a_package_cannot_step_is_refused(optimizer: str, gpu: str, told: str) -> None:
    """The CUDA build raised for the first two; the last left whole tensors in fp32 behind, kernel by kernel."""
    setup = TrainingSetup(seq_len=64, precision="bf16", optimizer=optimizer)
    with pytest.raises(SetupError, match=told):
        estimate(load_model(DATA["config"], "causal-lm"), setup, load_gpu(gpu))
