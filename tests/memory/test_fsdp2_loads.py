"""How FSDP2's shards come to the GPU, against PyTorch's CUDA build (``tests/data/fsdp2_loads.json``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.replaying.replay import replay
from memplan.sources.models import load_model
from memplan.sources.stacks import read_preset
from memplan.training.setup import TrainingSetup

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "fsdp2_loads.json").read_text()
)
TOLERANCE = 1e-4
"""Tables of 256 bytes are rounded up to 512."""


def name_of(case: dict[str, Any]) -> str:
    return f"{case['model']}, {case['num_gpus']}, {case['engine_options']['init_device']}"


@pytest.mark.parametrize("case", [pytest.param(each, id=name_of(each)) for each in DATA["cases"]])
def test_as_the_real_one(case: dict[str, Any]) -> None:
    model = load_model(DATA["models"][case["model"]], "causal-lm")
    setup = TrainingSetup(
        engine="fsdp",  # type: ignore[arg-type]
        num_gpus=case["num_gpus"],
        seq_len=64,
        engine_options=case["engine_options"],
    )
    answer = estimate(model, setup, None)
    assert answer.phases["load"].peak_bytes == pytest.approx(case["truth"]["load"], rel=TOLERANCE)
    ledger = Ledger()
    given = prepared(model, setup.resolve(model.context_length), None).rank_input
    program = program_of(given, ledger, workspace_bytes=0)
    program.load()  # type: ignore[attr-defined]
    found = replay(ledger.events, ledger.streams, ledger.cycle)
    assert found.reserved_bytes == case["truth"]["reserved"]


def test_the_output_matrix_takes_a_tied_tables_place() -> None:
    """``swap_tensors``: the shard that was made first goes, not the one that was made last."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = load_model(config, "causal-lm")
    setup = TrainingSetup(
        engine="fsdp",  # type: ignore[arg-type]
        num_gpus=4,
        seq_len=64,
        engine_options={"init_device": "to_empty"},
    )
    ledger = Ledger()
    given = prepared(model, setup.resolve(model.context_length), None).rank_input
    program_of(given, ledger, workspace_bytes=0).load()  # type: ignore[attr-defined]
    assert ledger.events[-1] == ~0
    assert ledger.events[0] == ledger.events[-2]


@pytest.mark.parametrize(
    ("preset", "place"),
    [("torchtitan", "to_empty"), ("prime-rl", "to_empty"), ("torchtune", "meta")],
)
def test_each_stack_loads_in_its_way(preset: str, place: str) -> None:
    found = read_preset(preset, {"num_gpus": 8, "engine": "fsdp"}).setup
    assert dict(found.engine_options)["init_device"] == place


def test_fsdp1_makes_none_so() -> None:
    setup = TrainingSetup(
        engine="fsdp1",  # type: ignore[arg-type]
        num_gpus=8,
        seq_len=64,
        engine_options={"init_device": "to_empty"},
    )
    with pytest.raises(SetupError, match="for fsdp1 write cpu, meta or cuda"):
        estimate(load_model("gpt2", "causal-lm"), setup, None)


def test_two_stacks_run_under_expandable_segments() -> None:
    """prime-rl's launcher sets them (``DEFAULT_TRAINER_ENV_VARS``), torchtitan's too (``run_train.sh``, since October 2024)."""
    assert read_preset("prime-rl").setup.allocator.value == "expandable"
    assert read_preset("torchtitan").setup.allocator.value == "expandable"
    assert read_preset("torchtune").setup.allocator.value == "default"
