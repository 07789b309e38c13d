"""Blocks that are small and live long: they decide which segments the allocator has to ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.scratch import flash_forward_scratch
from memplan.graph.block_script import BlockScript
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.ends import batch_of
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.model.attention import AttentionSpec
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.batches import one_batch
from tests.memory.test_orders import num_parted, rank_input, recorded_tokens, tokens_of

RECORDS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "small_orders.json").read_text(encoding="utf-8")
)["records"]
"""The second step of tiny models with every block, however small."""
BY_NAME = {record["name"]: record for record in RECORDS}


def given_of(record: dict[str, Any], **fields: Any) -> RankInput:
    model = load_model(record["config"], fields.pop("task", record["task"]))
    return rank_input(model, TrainingSetup(**{**record["setup"], **fields}))


def sizes_of_step(given: RankInput) -> list[int]:
    """What is asked for in the first step and while the model is loaded [bytes]."""
    ledger = Ledger()
    program = program_of(given, ledger, workspace_bytes=0)
    program.start()
    program.run_step(0)
    return [event for event in ledger.events if event > 0]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record["name"]))
def test_every_block_has_its_place(record: dict[str, Any]) -> None:
    ledger = Ledger()
    program = program_of(given_of(record), ledger, workspace_bytes=0)
    program.start()
    program.run_step(0)
    begin = len(ledger.events)
    program.run_step(1)
    predicted = tokens_of(ledger.events, begin, least_units=1)
    parted = num_parted(predicted, recorded_tokens(record["events"]))
    assert parted == 0


def test_a_batch_is_a_block_for_each_tensor() -> None:
    ids = 2 * 320 * 8
    assert batch_of(given_of(BY_NAME["llama"]).tape) == [ids, ids]
    classified = given_of(BY_NAME["bert"], task="sequence-classification")
    assert batch_of(classified.tape) == [ids, ALLOCATION_ROUNDING]
    spans = given_of(BY_NAME["bert"], task="question-answering")
    assert batch_of(spans.tape) == [ids, ALLOCATION_ROUNDING, ALLOCATION_ROUNDING]
    with one_batch():
        assert batch_of(given_of(BY_NAME["llama"]).tape) == [ids]


def test_an_evaluation_lets_all_of_a_batch_go() -> None:
    ledger = Ledger()
    program = program_of(given_of(BY_NAME["llama"], evaluation=2), ledger, workspace_bytes=0)
    program.start()
    held = []
    for step in range(3):
        program.run_step(step)
        alive = sum(event if event > 0 else -ledger.events[~event] for event in ledger.events)
        held.append(alive)
    assert held[1] == held[2]


@pytest.mark.parametrize(
    ("engine", "scaled"), [({"engine": "ddp"}, 0), ({"zero_stage": 1}, 2), ({"zero_stage": 3}, 2)]
)
def test_deepspeed_scales_the_loss_twice(engine: dict[str, Any], scaled: int) -> None:
    """The loss and its gradient are there in any case; stage 3 has a flag besides."""
    fields = {"engine": "deepspeed", "precision": "bf16-master", "num_gpus": 2, **engine}
    if fields["engine"] == "ddp":
        fields["precision"] = "bf16"
    given = given_of(BY_NAME["llama"], **fields)
    names = program_of(given, Ledger(), workspace_bytes=0).scaled_losses  # type: ignore[attr-defined]
    assert len(names) == scaled


def test_only_half_precision_is_looked_through() -> None:
    """A copy of the states and three times their bits, behind each of two encoder layers."""
    bart, states = BY_NAME["bart"], 2 * 320 * 256
    fields = {"engine": "deepspeed", "zero_stage": 1, "num_gpus": 2}
    plain, half = (
        sizes_of_step(given_of(bart, precision=f"{name}-master", **fields))
        for name in ("bf16", "fp16")
    )
    added = sorted(half)
    for size in plain:
        added.remove(size)
    bits = [size for size in added if size == states]
    copies = [size for size in added if size == 2 * states]
    assert len(bits) == 3 * len(copies) == 6


SHAPE = Shape(1, 128, 4096, AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64))


def test_split_keys_come_before_the_random_state() -> None:
    tape = given_of(BY_NAME["llama"]).tape
    blocks = flash_forward_scratch(tape, SHAPE)
    assert blocks[:2] == (RESULT, RESULT)
    assert blocks[4:] == (RESULT, ~2, ~3)
    assert 0 < blocks[2] < blocks[3]
    dropped = Shape(
        1, 128, 4096, AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, dropout=0.1)
    )
    assert flash_forward_scratch(tape, dropped) == (RESULT, RESULT, ALLOCATION_ROUNDING, RESULT, ~2)


def test_a_kernel_makes_its_results_where_its_script_says() -> None:
    script = BlockScript()
    made = script.kernel((1024, 2048, 4096), (512, RESULT, 1536, RESULT, ~2))
    assert len(made) == 3
    assert [step for step in script.steps if step > 0] == [512, 1024, 1536, 2048, 4096]
