"""A sweep's work in anybody's executor is the same sweep, and what an executor loses is said."""

import gc
import os
import signal
import sys
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError, WorkerLostError
from memplan.search.in_parallel.elsewhere import (
    CHUNK_S,
    MAX_CHUNK,
    Chunk,
    Elsewhere,
    answer_here,
    next_size,
)
from memplan.search.sweep import Sweep

AXES = {
    "num_gpus": [1, 2, 3, 8],
    "zero_stage": [0, 2],
    "micro_batch_size": [1, 2, 3],
    "seq_len": 64,
}


@pytest.fixture(scope="module")
def alone() -> Sweep:
    return memplan.sweep("gpt2", AXES, gpus=["t4", "h100"])


EXECUTORS = (
    pytest.param(lambda: ThreadPoolExecutor(2), id="threads"),
    pytest.param(lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")), id="processes"),
)


@pytest.mark.parametrize("make", EXECUTORS)
def test_the_same_rows_in_the_same_order(alone: Sweep, make: Any) -> None:
    with make() as executor:
        spread = memplan.sweep("gpt2", AXES, gpus=["t4", "h100"], executor=executor)
        assert spread.rows() == alone.rows()
        assert spread.impossible == alone.impossible
        asked = memplan.sweep("gpt2", batch_size=[1, 2], seq_len=64, gpu="t4", executor=executor)
        assert len(asked.rows()) == 2
        assert executor.submit(int).result() == 0, "it stays open"


def numbers(given: int, start: int, stop: int) -> list[int]:
    if given in range(start, stop):
        msg = f"no {given}"
        raise SetupError(msg)
    return list(range(start, stop))


class Here(Executor):
    """Does the work at once, in this process."""

    def __init__(self, *, loses: int = -1) -> None:
        self.loses = loses
        self.chunks: list[range] = []

    def submit(self, function: Any, /, *args: Any, **_: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        _, start, stop = args
        self.chunks.append(range(start, stop))
        if self.loses in range(start, stop):
            future.set_exception(RuntimeError("worker tcp://1.2.3.4 died\nfour times"))
        else:
            future.set_result(function(*args))
        return future


def work(given: int = -1) -> Elsewhere:
    return Elsewhere(work=numbers, given=given, shared=())


def test_every_piece_once_in_its_order() -> None:
    executor = Here()
    assert list(work().answers(executor, 10, 5_000)) == list(range(10, 5_000))
    assert [number for each in executor.chunks for number in each] == list(range(10, 5_000))
    assert max(map(len, executor.chunks)) > 20, "cheap pieces go in large chunks"
    assert list(work().answers(executor, 10, 10)) == []


def test_what_is_lost_is_said_behind_what_there_is() -> None:
    answers = work().answers(Here(loses=40), 0, 100)
    found = []
    with pytest.raises(WorkerLostError, match="died four times") as caught:
        found.extend(answers)
    assert found == list(range(len(found)))
    assert len(found) <= 40
    assert "\n" not in str(caught.value)
    with pytest.raises(SetupError, match="no 41"):
        list(work(41).answers(Here(), 0, 100))


def test_chunks_come_to_take_seconds() -> None:
    size = 4
    for _ in range(20):
        size = next_size(size, Chunk(answers=b"", seconds=size * 0.01, count=size))
    assert size * 0.01 == pytest.approx(CHUNK_S)
    assert next_size(1, Chunk(answers=b"", seconds=60.0, count=1)) == 1
    assert next_size(MAX_CHUNK, Chunk(answers=b"", seconds=0.0, count=9)) == MAX_CHUNK


def test_objects_are_made_once_in_each_worker() -> None:
    from pickle import dumps

    from memplan.search.in_parallel.elsewhere import _opened_once

    _opened_once.cache_clear()
    sent = dumps((numbers, -1, ()))
    for start in range(5):
        assert answer_here(sent, start, start + 1).count == 1
    assert (_opened_once.cache_info().misses, _opened_once.cache_info().hits) == (1, 4)


def process_number(_: int, start: int, stop: int) -> list[int]:
    print("what a model prints is no answer")
    return [os.getpid()] * (stop - start)


def test_a_thread_has_a_process_of_its_own_which_ends_with_it() -> None:
    """Beside other threads lifetimes are not what Python counts: a profiler keeps frames, another estimate writes too."""
    gc.freeze()  # what other tests have left is not looked through
    here = Elsewhere(work=process_number, given=0, shared=())
    assert set(here.answers(Here(), 0, 3)) == {os.getpid()}
    with ThreadPoolExecutor(1) as executor:
        (process,) = set(here.answers(executor, 0, 20))
        assert process != os.getpid()
        os.kill(process, signal.SIGKILL)
        (another,) = set(here.answers(executor, 0, 20))
        assert another not in (process, os.getpid())
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(another, 0)


def test_frames_that_a_profiler_keeps_change_no_row(alone: Sweep) -> None:
    stopped = threading.Event()

    def look() -> None:
        frames: object = None
        while not stopped.wait(0.002):
            frames = sys._current_frames()
        del frames

    profiler = threading.Thread(target=look)
    profiler.start()
    try:
        with ThreadPoolExecutor(2) as executor:
            rows = memplan.sweep("gpt2", AXES, gpus=["t4", "h100"], executor=executor).rows()
    finally:
        stopped.set()
        profiler.join()
    assert rows == alone.rows()
