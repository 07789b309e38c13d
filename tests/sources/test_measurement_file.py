"""Measurements are written and read whole, and a slip in one is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.estimator.measured import Death
from memplan.sources.measurement_file import (
    card_named,
    card_of,
    measurement_values,
    read_measurement,
)
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup
from memplan.units import GIB

SENT = Path(__file__).parent.parent / "measured" / "sent" / "h100-phi-1-fp32.json"


@pytest.fixture
def values() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SENT.read_text(encoding="utf-8"))
    return found


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_a_round(tmp_path: Path) -> None:
    setup = TrainingSetup(
        num_gpus=4, engine="fsdp", checkpointing="0-3,7", dropout=0.0, allocator="expandable",
        engine_options={"reshard_after_forward": False, "reduce_dtype": "bf16"},
    ).resolve(512)  # type: ignore[arg-type]  # fmt: skip
    one = replace(read_measurement(SENT), setup=setup, death=Death(part="backward", message="x"))
    again = read_measurement(written(tmp_path / "a.json", measurement_values(one)))
    assert again == one
    lora = Lora(rank=16, targets=("q_proj", "v_proj"), dropout=0.1, rank_pattern={"q_proj": 4})
    other = replace(one, setup=TrainingSetup(adapter=lora, optimizer="sgd").resolve(64), death=None)
    again = read_measurement(written(tmp_path / "b.json", measurement_values(other)))
    assert again == other


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("memplan_measurement", 9, "memplan_measurement: expected 1"),
        ("num_params", "many", "num_params: expected a whole number"),
        ("held_bytes", -1, "held_bytes: expected a whole number from 0 up"),
        ("is_fake", 0, "is_fake: expected true or false"),
        ("compute_capability", [9], "compute_capability: expected two whole numbers"),
        ("parts", {"warm-up": {}}, "parts: warm-up: expected"),
        ("death", {"part": 1}, "death: expected part and message"),
        ("setup", {"engin": "ddp"}, "setup: "),
        ("num_step", 3, "num_step: there is no such key. Did you mean 'num_steps'?"),
    ],
)
def test_slips(tmp_path: Path, values: dict[str, Any], key: str, value: object, told: str) -> None:
    path = written(tmp_path / "a.json", {**values, key: value})
    with pytest.raises(ConfigError) as caught:
        read_measurement(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


def test_cards(values: dict[str, Any], tmp_path: Path) -> None:
    """One that is listed has the memory that torch said; others' part of it is no room."""
    values["others_bytes"] = GIB
    card = card_of(read_measurement(written(tmp_path / "a.json", values)))
    assert (card.gpu_id, card.capacity_bytes) == ("h100-sxm-80gb", 85017493504 - GIB)
    unlisted = card_named("Some Card", 20 * GIB, (7, 5))
    assert (unlisted.capacity_bytes, unlisted.compute_capability) == (20 * GIB, (7, 5))
    assert not unlisted.has_bf16
