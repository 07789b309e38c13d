"""Work over several processes is the same work."""

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from memplan.errors import SetupError
from memplan.search.grid import Grid
from memplan.search.packing import packed, unpacked
from memplan.search.parallel import OrderedPool
from memplan.search.sweep import Sweep
from memplan.sources.catalog import load_gpu
from memplan.sources.models import load_model

AXES = {"num_gpus": [1, 8], "zero_stage": [0, 2, 3], "micro_batch_size": [1, 2, 3], "seq_len": 128}


def doubled(number: int) -> int:
    if number == 13:
        msg = "thirteen"
        raise SetupError(msg)
    return 2 * number


def own_number(_: int) -> int:
    return os.getpid()


def pool_of(work: object, *, chunk_size: int = 3) -> OrderedPool[int, int]:
    return OrderedPool(work, num_processes=2, chunk_size=chunk_size)  # type: ignore[arg-type]


def test_answers_come_in_the_order_of_the_tasks():
    assert list(pool_of(doubled).answers(range(100, 150))) == list(range(200, 300, 2))


def test_nothing_to_do_is_done():
    assert list(pool_of(doubled).answers([])) == []


def test_other_processes_do_the_work():
    assert os.getpid() not in set(pool_of(own_number).answers(range(20)))


def test_an_error_comes_through_and_no_process_is_left():
    before = multiprocessing.active_children()
    with pytest.raises(SetupError, match="thirteen"):
        list(pool_of(doubled).answers(range(20)))
    assert multiprocessing.active_children() == before


def test_tasks_are_read_no_further_than_they_are_needed_and_an_end_is_an_end():
    read: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(20, 10_000):
            read.append(number)
            yield number

    before = multiprocessing.active_children()
    answers = pool_of(doubled).answers(tasks())
    assert [next(answers) for _ in range(5)] == [40, 42, 44, 46, 48]
    assert len(read) < 40
    answers.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == before


def test_shared_objects_are_not_copied():
    shared = [1, 2, 3]
    (found, other) = unpacked(packed((shared, [1, 2, 3]), [shared]), [shared])
    assert found is shared
    assert other == shared
    assert other is not shared


def test_a_sweep_is_the_same_over_several_processes():
    model, gpus = load_model("gpt2"), [load_gpu("t4"), load_gpu("v100")]
    alone = Sweep(model, Grid(axes=AXES), gpus)
    spread = Sweep(model, Grid(axes=AXES), gpus, num_jobs=2)
    results = list(spread)
    assert [each.estimates for each in results] == [each.estimates for each in alone]
    rows = [each.to_dict() for result in results for each in result.estimates]
    assert rows == [each.to_dict() for result in alone for each in result.estimates]
    assert all(each.model is model for result in results for each in result.estimates)
    assert spread.num_tried == alone.num_tried
    assert spread.impossible == alone.impossible
    assert spread.assumptions == alone.assumptions
