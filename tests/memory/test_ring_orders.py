"""Ring attention's own blocks, one after the other, against torch's function run by itself."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator.job import Job
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Operation
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.test_orders import Order, Token, num_parted

DATA = json.loads((Path(__file__).parent.parent / "data" / "ring.json").read_text("utf-8"))
RECORDS: list[dict[str, Any]] = DATA["records"]
LEAST = 4096
"""Random states are left out."""
HELD_BY_NCCL = 2
"""What is joined to be sent stays while a real group sends it, and goes at once where none does."""
MERGED_IN_PLACE = 1
"""The merged statistics are returned as they are; here the result is a block of its own, and they end."""
SENT_IN_TURN = 16
"""Of each exchange all to all but the first, the same once more: what was joined and what arrives are as large."""
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 1,
}  # fmt: skip


def attention_of(record: dict[str, Any]) -> Operation:
    degree = record["degree"]
    setup = TrainingSetup(
        engine="fsdp", num_gpus=degree, context_parallel=degree, seq_len=512 * degree,
        micro_batch_size=2, precision="bf16",
        engine_options={"context_parallel_rotate_method": record["rotate"]},
    )  # fmt: skip
    tape = Job.of(load_model(CONFIG), setup, load_gpu("a100-sxm4-80gb")).walked.tape
    found = (each for segment in tape.segments for each in segment.operations)
    return next(each for each in found if each.kind is OperationKind.FLASH_ATTENTION)


def tokens_of(steps: Sequence[int], results: Iterable[int]) -> list[Token]:
    """What comes and goes; the operation's own results where it makes them."""
    order, coming = Order(), list(results)
    for number, step in enumerate(steps):
        if step == RESULT and coming:
            order.new(coming.pop(0), number)
        elif step >= LEAST:
            order.new(step, number)
        elif step < 0 and steps[~step] >= LEAST:
            order.end(steps[~step], ~step)
    return order.settle()


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: f"{each['degree']}-{each['rotate']}")
def test_order(record: dict[str, Any]) -> None:
    ring = attention_of(record)
    query = ring.outputs[0].storage.num_bytes
    known = HELD_BY_NCCL + MERGED_IN_PLACE
    if record["rotate"] == "alltoall" and record["degree"] > 2:
        known += SENT_IN_TURN
    forward = tokens_of(ring.forward_scratch, (query,))
    assert num_parted(forward, tokens_of(record["forward"], ())) == known
    backward = tokens_of(ring.backward_scratch, (query, 2 * query))
    assert num_parted(backward, tokens_of(record["backward"], ())) == 0
