"""The diagram of a pipeline's ranks."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.report.stages import BAR_WIDTH, bar, pipeline_places, stage_rows
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

MODEL = load_model("llama-3.2-1b")


def answer(**fields: Any) -> Any:
    setup = {"engine": "ddp", "seq_len": 1024, "gradient_accumulation_steps": 8, **fields}
    return estimate(MODEL, TrainingSetup(**setup), load_gpu("h100"))


def test_every_place_has_its_layers_micro_batches_and_bytes() -> None:
    found = answer(num_gpus=4, pipeline_parallel=4)
    places = pipeline_places(found)
    assert [place.stages[0].words for place in places] == [
        "embedding + 0-3", "4-7", "8-11", "12-15 + head",
    ]  # fmt: skip
    assert [place.in_flight for place in places] == [4, 3, 2, 1]  # 1F1B: min(m, p - r)
    peaks = {place.account.peak.peak_bytes for place in places}
    assert max(peaks) == found.peak_bytes
    assert {run for each in found.ranks for run in each.ranks} == {place.ranks for place in places}


def test_stages_of_one_rank_are_told_apart() -> None:
    places = pipeline_places(
        answer(
            num_gpus=8, tensor_parallel=2, pipeline_parallel=4, pipeline_schedule="interleaved-1f1b"
        )
    )
    assert [[stage.number for stage in place.stages] for place in places] == [
        [0, 4], [1, 5], [2, 6], [3, 7],
    ]  # fmt: skip
    assert places[3].ranks == range(6, 8)


def test_a_bar_is_as_long_as_its_bytes() -> None:
    found = answer(num_gpus=4, pipeline_parallel=4)
    fullest = found.account.peak
    assert len(bar(fullest, fullest.peak_bytes)) == BAR_WIDTH
    assert len(bar(fullest, 2 * fullest.peak_bytes)) == BAR_WIDTH // 2


def test_without_a_pipeline_there_are_no_stages() -> None:
    assert pipeline_places(answer()) == ()


def test_explain_draws_it(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    command = (
        "explain", "llama-3.2-1b", "--gpus", "2", "--engine", "ddp", "--pp", "2",
        "--gradient-accumulation", "4", "--seq-len", "512",
    )  # fmt: skip
    drawn = run(*command, "--timeline").stdout
    assert "embedding + 0-7" in drawn
    assert "8-15 + head" in drawn
    assert "In flight: micro-batches" in drawn
    rows = json.loads(run(*command, "--format", "json").stdout)["rows"]
    staged = [row for row in rows if row["section"] == "stage"]
    assert [row["path"] for row in staged] == ["ranks 0/stage 0", "ranks 1/stage 1"]
    assert stage_rows(answer(num_gpus=1)) == []
