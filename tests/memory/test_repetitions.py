"""A repetition that is written down as another was played asks for the same blocks, in the same order."""

from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import MIB
from tests.memory.test_repeated_steps import WAYS
from tests.memory.test_tally import MODELS

SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2},
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
