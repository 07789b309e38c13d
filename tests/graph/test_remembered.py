"""Tapes are forgotten together where too much was recorded, whoever holds them."""

import weakref

import pytest

from memplan import estimate
from memplan.estimator import recording
from memplan.estimator.time.step_time import step_time
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.remembered import MOST_OPERATIONS, OF_TAPES
from memplan.model.spec import ModelSpec


def test_what_was_recorded_goes_with_all_that_was_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tapes: list[weakref.ref[Tape]] = []
    record_model = recording.record_model

    def watched(model: ModelSpec, options: TapeOptions) -> Tape:
        tape = record_model(model, options)
        tapes.append(weakref.ref(tape))
        return tape

    def figures() -> list[object]:
        found = [estimate("gpt2", gpu="l4", gpus=8, seq_len=77, zero=zero) for zero in (0, 1, 2, 3)]
        return [
            (each.required_bytes, each.peak_bytes, step_time(each).expected_s) for each in found
        ]

    OF_TAPES.num_operations = MOST_OPERATIONS + 1  # of other tests
    monkeypatch.setattr(recording, "record_model", watched)
    kept = figures()
    assert 0 < OF_TAPES.num_operations < MOST_OPERATIONS
    num_recorded = len(tapes)
    monkeypatch.setattr(OF_TAPES, "most_operations", 0)
    assert figures() == kept
    assert len(tapes) > num_recorded
    assert [number for number, tape in enumerate(tapes[:-1]) if tape() is not None] == []
