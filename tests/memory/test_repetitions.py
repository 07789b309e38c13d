"""A repetition that is written down as another was played asks for the same blocks, in the same order."""

from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.programs.deepspeed_stages.zero3 import ShardedParametersProgram
from memplan.memory.programs.pipeline import PipelineProgram
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.schedules import Pass
from memplan.units import MIB
from tests.memory.test_repeated_steps import WAYS
from tests.memory.test_tally import MODELS

SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 5},
    {"checkpointing": "full"},
    {"checkpointing": "selective", "gradient_accumulation_steps": 2},
    {"offload_activations": "streamed"},
)


class BlockByBlock(Ledger):
    """A ledger into which every repetition is played."""

    __slots__ = ()

    @property
    def repeats(self) -> bool:
        return False


def run_of(model: str, fields: dict[str, Any], ledger: Ledger) -> Ledger:
    config, task = MODELS[model]
    resolved = TrainingSetup(**{"seq_len": 64, **fields}).resolve()
    given = prepared(load_model(config, task), resolved, None).rank_input
    program_of(given, ledger, workspace_bytes=MIB).run(num_steps=3)
    return ledger


@pytest.mark.parametrize("way", WAYS)
def test_repetitions_are_written_down_as_they_are_played(way: str) -> None:
    num_compared = 0
    for model in ("gpt2", "t5", "mixtral"):
        for settings in SETTINGS:
            fields = {**WAYS[way], **settings}
            try:
                played = run_of(model, fields, BlockByBlock())
            except ValueError:
                continue  # no such setup
            written = run_of(model, fields, Ledger())
            assert written.events == played.events, (model, settings)
            assert written.streams == played.streams, (model, settings)
            num_compared += 1
    assert num_compared


def test_passes_of_a_pipeline_are_played_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches a step has."""
    played: list[Pass] = []
    run = PipelineProgram._run

    def noted(self: PipelineProgram, each: Pass, step: int) -> None:
        played.append(each)
        run(self, each, step)

    monkeypatch.setattr(PipelineProgram, "_run", noted)
    counts = []
    for steps in (20, 200):
        played.clear()
        fields = {**WAYS["Megatron's pipeline"], "gradient_accumulation_steps": steps}
        assert len(run_of("gpt2", fields, Ledger()).steps) == 2
        counts.append(len(played))
    assert counts[0] == counts[1] < 2 * 20


def test_the_third_step_of_stage_3_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []
    train = ShardedParametersProgram.train

    def noted(self: ShardedParametersProgram, step: int, *, num_micro_batches: int) -> None:
        played.append(step)
        train(self, step, num_micro_batches=num_micro_batches)

    monkeypatch.setattr(ShardedParametersProgram, "train", noted)
    fields = {"engine": "deepspeed", "zero_stage": 3, "num_gpus": 4}
    assert len(run_of("gpt2", fields, Ledger()).steps) == 3
    assert played == [0, 1]
