"""The collector waits while setups are estimated, and is as it was afterwards."""

import gc
from collections.abc import Iterator

import pytest

import memplan
from memplan.errors import SetupError
from memplan.search.patience import PATIENCE, PatientCollector
from memplan.search.planning.goal import Goal
from memplan.search.planning.planner import plan
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model


@pytest.fixture(autouse=True)
def usual_collector() -> Iterator[None]:
    """Off, however: it would look through all that other tests have left, for seconds."""
    before = gc.get_threshold()
    gc.disable()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_the_collector_waits_until_the_last_one_has_gone() -> None:
    patient = PatientCollector()
    with patient:
        with patient:
            assert gc.get_threshold() == (PATIENCE, 10, 10)
        assert gc.get_threshold() == (PATIENCE, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_switched_off_stays_so() -> None:
    gc.set_threshold(0)
    with PatientCollector():
        assert gc.get_threshold()[0] == 0


def test_between_two_results_of_a_sweep_it_is_as_the_caller_has_it() -> None:
    for _ in memplan.sweep("gpt2", {"micro_batch_size": [1, 2], "seq_len": 128}):
        assert gc.get_threshold() == (700, 10, 10)


def test_an_error_gives_it_back() -> None:
    with pytest.raises(SetupError):
        plan(
            load_model("gpt2"),
            Goal(zero_stages=(3,), num_gpus=(1,), tensor_parallel=(2,)),
            load_gpu("t4"),
        )
    assert gc.get_threshold() == (700, 10, 10)
