"""Peaks with the kernels that users get, against every record of ``allocator.jsonl``.

The records come from PyTorch's own CUDA build, so everything that kernels and cuBLAS allocate is in
them: ``kernel_scratch`` is on, and attention is what the card dispatches to.
"""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from memplan.sources.about_models.registry import builtin_config
from tests.accuracy.allocator_records import engine_of, predict
from tests.accuracy.comparison import Comparison, read_records, remember

MOST = 0.0001
"""Bar of a record in which nothing is known to be missing."""


class Missing(Enum):
    """What is known to be missing, and how far below the truth memplan may be for it."""

    NOTHING = ("nothing", MOST)
    HIDDEN_STATE = ("a hidden state or two that ZeRO-3 holds at its fullest", 0.002)

    def __init__(self, words: str, bar: float) -> None:
        self.words = words
        self.bar = bar

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Missing":
        """By the record's own mechanisms."""
        stage = record["settings"].get("stage")
        return cls.HIDDEN_STATE if stage == 3 else cls.NOTHING


def compare(records: list[dict[str, Any]]) -> dict[str, Comparison]:
    """Relative errors of one GPU and of each engine."""
    found: dict[str, Comparison] = {}
    for record in records:
        comparison = found.setdefault(engine_of(record["settings"]), Comparison())
        kind = {"model_type": record["config"]["model_type"]}
        comparison.add({**record, **kind}, record["real"], predict)
    return found


def errors_by_cause(records: list[dict[str, Any]]) -> dict[Missing, list[float]]:
    """Signed relative errors, each checked against the bar of what is missing."""
    found: dict[Missing, list[float]] = {}
    for record in records:
        truth = record["real"]["requested_peak"]
        error = predict(record)["requested_peak"] / truth - 1
        missing = Missing.of(record)
        assert -missing.bar <= error <= MOST, (record["settings"], error, missing.words)
        found.setdefault(missing, []).append(error)
    return found


NAMES = {"single": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed ZeRO 1-3"}


@pytest.mark.reference
def test_requested_peak(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    records = list(read_records(reference_dir / "allocator.jsonl"))
    found = compare(records)
    with capsys.disabled():
        for name, comparison in found.items():
            sys.stdout.write(f"\nallocator.jsonl, {name}: {comparison.table()}\n")
    assert not any(comparison.refused for comparison in found.values())
    for missing, errors in errors_by_cause(records).items():
        if missing is not Missing.NOTHING:
            assert min(errors) < -MOST, f"its bar is idle: {missing.words}"
    remember(
        "CUDA kernels",
        {f"peak, {NAMES[name]}": each.row("requested_peak") for name, each in found.items()},
        update=pytestconfig.getoption("--update-accuracy"),
        points=[point for each in found.values() for point in each.points("requested_peak")],
        found=found.values(),
    )


def config_of(name: str, models: dict[str, Any]) -> dict[str, Any] | None:
    """A model of the file's own, or a built-in one."""
    if name in models:
        own: dict[str, Any] = models[name]
        return own
    builtin = builtin_config(name)
    return dict(builtin[1]) if builtin is not None else None


def test_representative_records(checkout: Path) -> None:
    """Those of built-in models and of the file's own, for users without the reference folder."""
    data = json.loads((checkout / "tests" / "data" / "allocator.json").read_text())
    records = [
        {**run, "config": config, "real": run}
        for run in data["runs"]
        if (config := config_of(run["model"], data["models"])) is not None
    ]
    assert len(records) >= 50
    errors_by_cause(records)
