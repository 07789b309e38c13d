"""Whole runs of PyTorch's own CUDA build, in memplan's own words, and what memplan says of them."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from memplan.estimator import estimate
from memplan.memory.replaying.allocator import SEGMENT_ROUNDING_BYTES
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.batches import one_batch


def recorded_runs(path: Path) -> list[dict[str, Any]]:
    """All runs of a file, with the truths that memplan is held to [bytes]."""
    runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["records"]
    for run in runs:
        run["model_type"] = run["config"]["model_type"]
        run["truth"] = {
            "requested_peak": run["requested"],
            "reserved_peak": run["reserved"],
            "least_capacity": run["lived"][-1][0] * SEGMENT_ROUNDING_BYTES,
        }
        if "held" in run:
            run["truth"]["held"] = run["held"]
    return runs


SHARDED = {"fsdp": "FSDP2", "fsdp1": "FSDP1"}


def kind_of(run: dict[str, Any]) -> str:
    """The engine, as the accuracy table names it."""
    setup = run["setup"]
    if setup["engine"] == "deepspeed":
        return f"ZeRO-{setup['zero_stage']}"
    if setup["engine"] in SHARDED:
        return SHARDED[setup["engine"]]
    return "DDP" if setup["num_gpus"] > 1 else "one GPU"


def said_of(runs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The same figures of each from memplan: of rank 0, whose runs these are.

    Those of one kind of batch are asked together: what is remembered of it is forgotten once.
    """
    found: dict[str, dict[str, int]] = {}
    for is_one in (True, False):
        with one_batch() if is_one else nullcontext():
            alike = (run for run in runs if (run.get("labels") == "ids") == is_one)
            found |= {run["id"]: _said_of(run) for run in alike}
    return [found[run["id"]] for run in runs]


def _said_of(run: dict[str, Any]) -> dict[str, int]:
    model = load_model(run["config"], run["task"])
    answer = estimate(model, TrainingSetup(**run["setup"]), load_gpu(run["gpu"]), rank=0)
    return {
        "requested_peak": answer.peak_bytes,
        "reserved_peak": answer.reserved_bytes,
        "least_capacity": answer.required_bytes,
        "held": answer.held_bytes,
    }


def lives(run: dict[str, Any], capacity_bytes: int) -> bool:
    """Whether all of its steps complete with so much for the allocator's segments."""
    steps = capacity_bytes // SEGMENT_ROUNDING_BYTES
    return any(low <= steps and (high is None or steps < high) for low, high in run["lived"])
