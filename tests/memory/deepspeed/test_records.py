"""A few runs of the real engine, bytes and all: one of each kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.deepspeed_records import account_of, predict

DATA = json.loads(
    (Path(__file__).parents[2] / "data" / "deepspeed.json").read_text(encoding="utf-8")
)
HELD = ("before", "after_step", "cpu_after_step")


def _records() -> list[Any]:
    found = []
    for record in DATA["records"]:
        settings = record["settings"]
        full = {**record, "config": DATA["configs"][settings["model"]]}
        name = f"{settings['model']}-zero{settings['stage']}-n{settings['world']}-{record['id']}"
        found.append(pytest.param(full, id=name))
    return found


@pytest.mark.parametrize("record", _records())
def test_record(record: dict[str, Any]) -> None:
    predicted = predict(record)
    for name, truth in record["bytes"].items():
        bar = 0.0005 if name in HELD else 0.004
        assert abs(predicted[name] - truth) <= bar * truth, name


@pytest.mark.parametrize("record", _records())
def test_nothing_is_left_out(record: dict[str, Any]) -> None:
    account = account_of(record)
    assert account.left_out == ()
    for phase in account.phases:
        assert phase.peak_bytes == sum(phase.components.values())
        assert all(entry.num_bytes > 0 for entry in phase.entries)
