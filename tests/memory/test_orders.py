"""The order in which torch asks for blocks and gives them back, event by event, for each kind of layer.

Allocated bytes alone are right with any order: what is reserved, and the least capacity, are not.
"""

import json
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.model.spec import ModelSpec
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div

RECORDED = Path(__file__).parent.parent / "data" / "orders.json"
"""The second step of tiny models, block by block; what is said of it stands in the file."""
KNOWN = RECORDED.with_name("orders_known.json")
"""How many events of a step are known to stand elsewhere, and why: a change that makes it more fails."""
MOST_SPARE = 2
"""A bound is at most so many times what is reached."""
MOST_DIFFERENT = 4
"""Kinds of layers of which anything is known to stand elsewhere."""
MOST_EVENTS = 16
"""Their events in all."""
DATA: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
LEAST_UNITS: int = DATA["least_units"]
DIFFERENT: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))

WHOLE: list[dict[str, Any]] = [
    {**record, "setup": {**each["setup"], **record["setup"]}}
    for name in ("type_orders.json", "engine_orders.json")
    for each in [json.loads(RECORDED.with_name(name).read_text(encoding="utf-8"))]
    for record in each["records"]
]
"""The second step of one model of each further type, and of one under each engine, with every block; which of its events
stand elsewhere is known."""

Token = tuple[str, int, int]
"""What happens, to how many units, and to which of the blocks of that size, the oldest first."""


class Order:
    """Blocks that come and go. Ends with nothing asked for between them leave the allocator as it is in
    any order, and count as one."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.alive: dict[int, list[object]] = {}
        self.ended: list[tuple[int, object]] = []
        self.old: list[int] = []

    def new(self, units: int, block: object) -> None:
        """A block comes."""
        self.settle()
        self.tokens.append(("new", units, 0))
        self.alive.setdefault(units, []).append(block)

    def end(self, units: int, block: object) -> None:
        """One goes."""
        if block in self.alive.get(units, ()):
            self.ended.append((units, block))
        else:
            self.old.append(units)

    def settle(self) -> list[Token]:
        """All so far, those that go at once by size and age."""
        places = sorted((units, self.alive[units].index(block)) for units, block in self.ended)
        self.tokens += [("old", units, 0) for units in sorted(self.old)]
        self.tokens += [("end", *each) for each in places]
        for units, block in self.ended:
            self.alive[units].remove(block)
        self.ended, self.old = [], []
        return self.tokens


def recorded_tokens(events: list[int | str], least_units: int = 1) -> list[Token]:
    """As the file writes them: a block by its units, the end of one by how many events ago it came, that
    of one from before the step by its units in quotes."""
    order = Order()
    for place, event in enumerate(events):
        if isinstance(event, str):
            units, block = -int(event), None
        else:
            block = place if event > 0 else place + event
            units = int(events[block])
        if units < least_units:
            continue
        if isinstance(event, int) and event > 0:
            order.new(units, block)
        else:
            order.end(units, block)
    return order.settle()


def predicted_tokens(record: dict[str, Any]) -> list[Token]:
    """The same of memplan's ledger."""
    return second_step(given_of(record))


def given_of(record: dict[str, Any]) -> RankInput:
    """What it runs."""
    model = load_model(record["config"], record["task"])
    return rank_input(model, TrainingSetup(**record["setup"]))


def rank_input(model: ModelSpec, setup: TrainingSetup) -> RankInput:
    """What one rank runs on the card of the records."""
    gpu = load_gpu(DATA["gpu"])
    resolved = setup.resolve(model.context_length, has_bf16=gpu.has_bf16)
    return prepared(model, resolved, gpu).rank_input


def second_step(given: RankInput) -> list[Token]:
    """What happens in it, without small blocks."""
    return tokens_of(*events_of_step(given), LEAST_UNITS)


def events_of_step(given: RankInput) -> tuple[list[int], int]:
    """All of the ledger's, and where the second step begins."""
    ledger = Ledger()
    workspace = workspace_bytes(load_gpu(DATA["gpu"]).compute_capability) // NUM_HANDLES
    program = program_of(given, ledger, workspace_bytes=workspace)
    program.start()
    program.run_step(0)
    begin = len(ledger.events)
    program.run_step(1)
    return ledger.events, begin


def tokens_of(events: list[int], begin: int, least_units: int) -> list[Token]:
    """What is done from an event on, without small blocks."""
    order = Order()
    for number, event in enumerate(events[begin:], begin):
        units = ceil_div(events[~event] if event < 0 else event, ALLOCATION_ROUNDING)
        if units < least_units:
            continue
        if event > 0:
            order.new(units, number)
        else:
            order.end(units, ~event)
    return order.settle()


def num_parted(predicted: list[Token], recorded: list[Token]) -> int:
    """Events of both sides that the other does not have there."""
    blocks = SequenceMatcher(None, predicted, recorded, autojunk=False).get_matching_blocks()
    return len(predicted) + len(recorded) - 2 * sum(block.size for block in blocks)


@pytest.mark.parametrize("record", DATA["records"], ids=lambda record: str(record["name"]))
def test_order(record: dict[str, Any]) -> None:
    """No more parts than is known; and what is known is not left to grow idle."""
    parted = num_parted(predicted_tokens(record), recorded_tokens(record["events"]))
    known = DIFFERENT.get(record["name"], {"events": 0})["events"]
    assert parted <= known
    assert known <= MOST_SPARE * parted, "its bound in orders_known.json is idle"


@pytest.mark.parametrize("record", WHOLE, ids=lambda record: str(record["name"]))
def test_order_of_every_block(record: dict[str, Any]) -> None:
    """Which gradients are views, where a variable goes, what a class adds or scales, what an engine gathers and reduces:
    each has its place in the order. What stands elsewhere is as many events as it was: one that comes nearer takes its
    figure along."""
    step = events_of_step(given_of(record))
    parted = [
        num_parted(tokens_of(*step, least), recorded_tokens(record["events"], least))
        for least in (LEAST_UNITS, 1)
    ]
    assert parted == record["apart"]


def test_what_is_known_has_a_reason() -> None:
    names = {record["name"] for record in DATA["records"]}
    assert set(DIFFERENT) <= names
    assert all(each["why"] for each in DIFFERENT.values())
    assert len(DIFFERENT) <= MOST_DIFFERENT
    assert sum(each["events"] for each in DIFFERENT.values()) <= MOST_EVENTS


def test_ends_between_two_requests_count_in_any_order() -> None:
    assert recorded_tokens([3, 3, -2, -2]) == recorded_tokens([3, 3, -1, -3])
    assert num_parted(recorded_tokens([3, 3, -2, 4]), recorded_tokens([3, 3, -1, 4]))
    assert tokens_of([512, 1024, ~1, ~0], 0, 1) == [
        ("new", 1, 0), ("new", 2, 0), ("end", 1, 0), ("end", 2, 0),
    ]  # fmt: skip
    assert tokens_of([512, 1024, ~0, ~1], 1, 2) == [("new", 2, 0), ("end", 2, 0)]
    assert tokens_of([512, 1024, ~0, ~1], 1, 1)[-2] == ("old", 1, 0)
