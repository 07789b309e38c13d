"""Work spread over processes, its results in the order in which it was asked for.

Threads would not help: estimating is Python from end to end.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import Event
from multiprocessing.synchronize import Event as StopEvent
from typing import Any, Generic, TypeVar

from memplan.search.packing import packed, unpacked

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

MAX_PROCESSES = 61
"""What Windows lets one process wait for."""
CHUNKS_ON_THE_WAY = 3
"""Of each process: one at work, and others so that none waits; results are held no longer than that."""


class OrderedPool(Generic[TaskT, ResultT]):
    """Processes that answer tasks as ``work`` does, and yield the answers in the tasks' order.

    ``shared`` are objects that tasks and answers hold again and again: they are sent once, and are
    the same objects in all answers. Closing the iterator, or an error in it, stops the processes.
    """

    def __init__(
        self,
        work: Callable[[TaskT], ResultT],
        *,
        num_processes: int,
        chunk_size: int,
        shared: Sequence[object] = (),
    ) -> None:
        self._work = work
        self._num_processes = min(num_processes, MAX_PROCESSES)
        self._chunk_size = chunk_size
        self._shared = tuple(shared)

    def answers(self, tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        """The answers, made while they are iterated over."""
        stop = Event()
        waiting: deque[Future[bytes]] = deque()
        remaining = iter(tasks)
        pool = ProcessPoolExecutor(
            self._num_processes, initializer=_begin, initargs=(self._work, self._shared, stop)
        )
        try:
            while True:
                while len(waiting) < CHUNKS_ON_THE_WAY * self._num_processes:
                    chunk = list(islice(remaining, self._chunk_size))
                    if not chunk:
                        break
                    waiting.append(pool.submit(_answer, packed(chunk, self._shared)))
                if not waiting:
                    return
                yield from unpacked(waiting.popleft().result(), self._shared)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


_worker: tuple[Callable[[Any], object], Sequence[object], StopEvent] | None = None
"""What a process works with, from ``_begin`` on."""


def _begin(work: Callable[[Any], object], shared: Sequence[object], stop: StopEvent) -> None:
    """Ctrl-C reaches every process of a terminal; what becomes of these is the first one's affair."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = work, shared, stop


def _answer(chunk: bytes) -> bytes:
    assert _worker is not None
    work, shared, stop = _worker
    found = []
    for task in unpacked(chunk, shared):
        if stop.is_set():
            break
        found.append(work(task))
    return packed(found, shared)
