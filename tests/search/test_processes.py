"""Work over several processes is the same work."""

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.search.grid import Grid
from memplan.search.in_parallel.elsewhere import Elsewhere
from memplan.search.in_parallel.packing import packed, unpacked
from memplan.search.in_parallel.processes import _how_it_ended, over_processes
from memplan.search.sweep import Sweep
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model

AXES = {"num_gpus": [1, 8], "zero_stage": [0, 2, 3], "micro_batch_size": [1, 2, 3], "seq_len": 128}


def doubled(_: None, start: int, stop: int) -> list[int]:
    if 13 in range(start, stop):
        msg = "thirteen"
        raise SetupError(msg)
    return [2 * number for number in range(start, stop)]


def own_number(_: None, start: int, stop: int) -> list[int]:
    return [os.getpid()] * (stop - start)


def spread(work: Any, start: int, stop: int) -> Iterator[Any]:
    elsewhere = Elsewhere(work=work, given=None, shared=())
    return over_processes(partial(elsewhere.answers, start=start, stop=stop), 2)


def test_answers_come_in_the_order_of_the_tasks():
    assert list(spread(doubled, 100, 150)) == list(range(200, 300, 2))


def test_nothing_to_do_is_done():
    assert list(spread(doubled, 5, 5)) == []


def test_other_processes_do_the_work():
    assert os.getpid() not in set(spread(own_number, 0, 20))


def test_an_error_comes_through_and_no_process_is_left():
    before = multiprocessing.active_children()
    with pytest.raises(SetupError, match="thirteen"):
        list(spread(doubled, 0, 20))
    assert multiprocessing.active_children() == before


def test_an_end_is_an_end():
    before = multiprocessing.active_children()
    answers = spread(doubled, 20, 10_000)
    assert [next(answers) for _ in range(5)] == [40, 42, 44, 46, 48]
    answers.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-9, "was ended by SIGKILL"),
        (-99, "ended with exit code -99"),
        (3, "ended with exit code 3"),
        (-15, "is gone"),
    ],
)
def test_how_a_process_ended(code: int, how: str):
    gone = [SimpleNamespace(exitcode=each, join=lambda _: None) for each in (-15, code, None)]
    assert _how_it_ended(dict(enumerate(gone))) == how


def test_shared_objects_are_not_copied():
    shared = [1, 2, 3]
    (found, other) = unpacked(packed((shared, [1, 2, 3]), [shared]), [shared])
    assert found is shared
    assert other == shared
    assert other is not shared


def test_a_sweep_is_the_same_over_several_processes():
    model, gpus = load_model("gpt2"), [load_gpu("t4"), load_gpu("v100")]
    alone = Sweep(model, Grid(axes=AXES), gpus)
    shared = Sweep(model, Grid(axes=AXES), gpus, num_jobs=2)
    results = list(shared)
    assert [each.estimates for each in results] == [each.estimates for each in alone]
    rows = [each.to_dict() for result in results for each in result.estimates]
    assert rows == [each.to_dict() for result in alone for each in result.estimates]
    assert all(each.model is model for result in results for each in result.estimates)
    assert shared.num_tried == alone.num_tried
    assert shared.impossible == alone.impossible
    assert shared.assumptions == alone.assumptions
