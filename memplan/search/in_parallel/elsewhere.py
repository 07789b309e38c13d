"""A sweep's work handed to any ``concurrent.futures.Executor``: processes, a Dask cluster, MPI ranks, loky.

Only numbers go out: from which combination of the grid to which. Grid, model and cards go with them as a few kilobytes, of which a
worker makes objects once, so that what it remembers of a model serves all its chunks. A chunk is as large as takes about
``CHUNK_S``, by what the last ones took.

How long a tensor lives is how long Python keeps the name of it, so an estimate has to be alone in its process: a profiler that
looks at the frames of all threads (``sys._current_frames``; a Dask worker has one that does a hundred times a second) keeps what
it sees for a while, and another thread's estimate writes on the same tape. What an executor runs in a thread beside others is
therefore done by a process of that thread's own.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import lru_cache
from time import perf_counter
from typing import Any, TypeVar

from memplan.errors import WorkerLostError
from memplan.fast_dataclass import dataclass
from memplan.search.in_parallel.packing import packed, unpacked
from memplan.text import one_line, shortened

PartT = TypeVar("PartT")

CHUNK_S = 2.0
"""What a chunk is to take: asking for one and handing it over takes some hundredths of a second over a network."""
FIRST_CHUNK, MAX_CHUNK = 4, 65_536
"""Combinations of the first chunks, and of any."""
GROWTH = 4
"""How many times as large a chunk may be as the one before it: neighbours cost alike, but not for ever."""
CHUNKS_ON_THE_WAY = 3
"""Of each worker: one at work, and others so that none waits; results are held no longer than that."""
USUAL_WORKERS = 16
"""Of an executor that does not say how many it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Work of which each piece is known by its number."""

    work: Callable[[Any, int, int], list[Any]]
    """What the pieces from one number to another come to: a function of a module's, with ``given``."""
    given: object
    """What it is given, the same for all."""
    shared: tuple[object, ...]
    """Objects of it that answers hold again and again: the same in all answers."""

    def answers(self, executor: Executor, start: int, stop: int) -> Iterator[Any]:
        """The answers in their order, made while they are iterated over.

        Raises ``WorkerLostError`` after the last answer before a chunk that the executor lost.
        """
        sent = pickle.dumps((self.work, self.given, self.shared), pickle.HIGHEST_PROTOCOL)
        waiting: deque[Future[Chunk]] = deque()
        most, size, following = CHUNKS_ON_THE_WAY * num_workers(executor), FIRST_CHUNK, start
        try:
            while following < stop or waiting:
                while following < stop and len(waiting) < most:
                    end = min(stop, following + max(1, min(size, (stop - following) // most)))
                    waiting.append(executor.submit(answer_chunk, sent, following, end))
                    following = end
                chunk = _result(waiting.popleft())
                size = next_size(size, chunk)
                yield from self._opened(chunk)
        finally:
            for each in waiting:
                each.cancel()

    def _opened(self, chunk: "Chunk") -> list[Any]:
        error, found, told = unpacked(chunk.answers, self.shared)
        if error is not None:
            raise error from _ElsewhereError(told)
        answers: list[Any] = found
        return answers


class _ElsewhereError(Exception):
    """Where an error was raised, in a process that is not this one."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What a worker hands back."""

    answers: bytes
    seconds: float
    count: int


def next_size(size: int, chunk: Chunk) -> int:
    """How large the following chunks are.

    >>> next_size(4, Chunk(answers=b"", seconds=0.4, count=4))
    16
    >>> next_size(400, Chunk(answers=b"", seconds=8.0, count=400))
    100
    """
    fitting = int(CHUNK_S / max(chunk.seconds / chunk.count, 1e-9))
    return max(1, min(fitting, GROWTH * max(size, chunk.count), MAX_CHUNK))


def answer_chunk(sent: bytes, start: int, stop: int) -> Chunk:
    """What a worker does: in a process of its own, unless this one has nothing else to do.

    A process that is ended from outside is begun anew once. Raises ``EOFError`` where that one is too.
    """
    if threading.current_thread() is threading.main_thread():
        return answer_here(sent, start, stop)
    try:
        return _own_process().answer(sent, start, stop)
    except (EOFError, OSError, pickle.UnpicklingError):
        del _own.process
        return _own_process().answer(sent, start, stop)


_own = threading.local()


def _own_process() -> "_Process":
    if not hasattr(_own, "process"):
        _own.process = _Process()
    process: _Process = _own.process
    return process


class _Process:
    """A process that answers one chunk after another, and ends with the thread that asks it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)

    def answer(self, sent: bytes, start: int, stop: int) -> Chunk:
        """One chunk. Raises ``EOFError`` or ``OSError`` where the process is gone."""
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None
        assert answering is not None
        pickle.dump((sent, start, stop), asking)
        asking.flush()
        chunk: Chunk = pickle.load(answering)
        return chunk


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def serve() -> None:
    """What such a process does, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as answering:
        os.dup2(2, 1)  # what anything prints is no answer
        while True:
            try:
                asked = pickle.load(sys.stdin.buffer)
                pickle.dump(answer_here(*asked), answering)
                answering.flush()
            except (EOFError, BrokenPipeError):
                os._exit(0)


def answer_here(sent: bytes, start: int, stop: int) -> Chunk:
    """The answers from one number to another, with the time they took."""
    begun = perf_counter()
    work, given, shared = _opened_once(sent)
    try:
        found = packed((None, work(given, start, stop), ""), shared)
    except Exception as error:  # noqa: BLE001 - raised again where the answer is read
        found = _told(error, shared)
    return Chunk(answers=found, seconds=perf_counter() - begun, count=stop - start)


def _told(error: Exception, shared: tuple[object, ...]) -> bytes:
    told = traceback.format_exc()
    try:
        return packed((error, None, told), shared)
    except (pickle.PicklingError, TypeError, AttributeError):
        return packed((RuntimeError(repr(error)), None, told), shared)


@lru_cache(maxsize=4)
def _opened_once(
    sent: bytes,
) -> tuple[Callable[[Any, int, int], list[Any]], Any, tuple[object, ...]]:
    """The objects, made once in each worker, and not for each chunk."""
    found: tuple[Callable[[Any, int, int], list[Any]], Any, tuple[object, ...]] = pickle.loads(sent)
    return found


def _result(future: "Future[Chunk]") -> Chunk:
    """The chunk. Whatever is raised here comes from the executor: errors of the work are in what it hands back."""
    try:
        return future.result()
    except Exception as error:
        words = shortened(one_line(f"{type(error).__name__}: {error}"), MAX_WORDS)
        msg = f"the executor lost a part of the work ({words}), and the rows from there on are missing"
        raise WorkerLostError(msg) from error


MAX_WORDS = 200
"""Characters of what an executor says."""


def num_workers(executor: Executor) -> int:
    """How many there are, as far as an executor says.

    The standard library's, loky's and mpi4py's keep ``_max_workers``; Dask's keeps its client.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> num_workers(ThreadPoolExecutor(3)), num_workers(Executor())
    (3, 16)
    """
    known = getattr(executor, "_max_workers", None)
    client = getattr(executor, "_client", None)
    if client is not None:
        known = sum(client.nthreads().values())
    return known if isinstance(known, int) and known > 0 else USUAL_WORKERS
