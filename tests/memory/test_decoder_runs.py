"""Decoders whose runs were drawn at random, against PyTorch's own CUDA build.

``tests/data/decoder_runs.jsonl`` holds two to four steps of each on a card that is not there: the bytes asked for at
most, what the caching allocator reserves for them, and the least capacity with which they complete. Each
was wrong before: where a class lets go of a variable, which gradients are views, where a mask or a buffer
stands decide where blocks come to lie, and so what a card needs.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.sources.models import load_model
from tests.accuracy.allocator_records import TASKS, ledger_of, peak_of
from tests.memory.capacities import bisected, in_steps

PATH = Path(__file__).parent.parent / "data" / "decoder_runs.jsonl"
RECORDS: list[dict[str, Any]] = [json.loads(line) for line in PATH.read_text().splitlines()]
REQUESTED = 1e-4
"""Small tensors that only the class's checks of a batch make are left out: a few KiB."""
EXACT = 1e-6


@pytest.mark.usefixtures("labels_are_ids")
@pytest.mark.parametrize("record", [pytest.param(each, id=each["id"]) for each in RECORDS])
def test_as_the_real_run(record: dict[str, Any]) -> None:
    truth = record["truth"]
    model = load_model(record["config"], TASKS[record["task"]])
    assert model.num_params == truth["params"]
    assert peak_of(record) == pytest.approx(truth["requested_peak"], rel=REQUESTED)
    ledger = ledger_of(record)
    assert ledger is not None
    on_card = in_steps(ledger, record["settings"]["steps"])
    reserved, least = on_card(None).reserved_bytes, bisected(on_card)
    assert reserved == pytest.approx(truth["reserved_peak"], rel=EXACT)
    assert least == pytest.approx(truth["least_capacity"], rel=EXACT)
