"""What the host takes, against CPU time measured of PyTorch and transformers on stub libraries.

Each record of ``host_times.jsonl`` is the least of twelve to 25 steps of one process, forward and backward, in
microseconds of CPU time. Kernels do nothing there, so all of it is the host's. The prices were fitted to the records
without an engine, and an engine's to what it adds; what is tested on is an H100 (``tests/measured/test_cards.py``).
"""

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from memplan.compute.rates import rates_of
from memplan.compute.roofline import segment_work
from memplan.estimator.job import Job
from memplan.estimator.time.timer import AGAIN, BACKWARD, FORWARD, Timer
from memplan.hardware.network import network_of
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from tests.accuracy.allocator_records import TASKS, setup_of
from tests.accuracy.comparison import read_records

NEAR, FAR = 0.10, 0.30
ENGINE_NEAR, ENGINE_FAR = 0.16, 0.50
"""What was measured beside other processes scatters more."""
FILE = Path(__file__).parent.parent / "data" / "host_times.jsonl"
RECORDS = list(read_records(FILE))


def asked_us(record: dict[str, Any]) -> dict[str, float]:
    """memplan's figures on the CPU that the records were made on."""
    settings = {"b": 1, "s": 128, "gpu": "h100", "reshard": True, "reduce_fp32": True, **record}
    settings["steps"] = 3
    setup, gpu = setup_of(settings), load_gpu("h100")
    model = load_model(record["config"], TASKS[record["task"]])
    job = Job.of(model, setup, gpu)
    timer = Timer(
        job.given, segment_work(job.given.tape, model, rates_of(gpu)), (),
        network=network_of(gpu, gpus_per_node=8), rates=rates_of(gpu),
    )  # fmt: skip
    found = dict.fromkeys(("forward_us", "backward_us"), 0.0)
    for each in job.given.tape.segments:
        for place in (FORWARD, BACKWARD, AGAIN):
            name = "forward_us" if place == FORWARD else "backward_us"
            found[name] += each.repeat * timer.asked_s(each.index, place)
    return {name: seconds * 1e6 for name, seconds in found.items()}


def errors_of(records: list[dict[str, Any]], names: tuple[str, ...]) -> list[float]:
    return [
        asked[name] / record[name] - 1
        for record in records
        for asked in [asked_us(record)]
        for name in names
    ]


def test_passes() -> None:
    """Forward and backward of six kinds of models, with and without checkpointing."""
    errors = errors_of(
        [each for each in RECORDS if "engine" not in each], ("forward_us", "backward_us")
    )
    assert len(errors) >= 100
    assert median(map(abs, errors)) <= NEAR
    assert max(map(abs, errors)) <= FAR


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_engines(engine: str) -> None:
    """With what the engine's own code adds."""
    records = [each for each in RECORDS if each.get("engine") == engine]
    errors = errors_of(records, ("forward_us", "backward_us"))
    assert len(errors) >= 16
    assert median(map(abs, errors)) <= ENGINE_NEAR
    assert max(map(abs, errors)) <= ENGINE_FAR
