"""Processes of one's own for a sweep: the standard library's executor, of which nothing is left however the first process ends.

A process of the pool waits for work in a queue that its siblings hold open too, so it would outlive a first process that is killed. Each has
the end of a pipe beside it, whose other end the first process alone holds, and ends with it at once.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from threading import Thread
from typing import TYPE_CHECKING, Any

from memplan.errors import WorkerLostError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MAX_PROCESSES = 61
"""What Windows lets one process wait for."""
PATIENCE_S = 1
"""How long exit codes are waited for."""


@contextmanager
def processes(count: int) -> Iterator[Executor]:
    """An executor of so many processes; when it is left they end, whatever they are at."""
    reading, writing = Pipe(duplex=False)
    executor = ProcessPoolExecutor(
        min(count, MAX_PROCESSES), initializer=_begin, initargs=(reading, writing)
    )
    try:
        yield executor
    finally:
        writing.close()
        reading.close()
        executor.shutdown(cancel_futures=True)


def over_processes(answers: Callable[[Executor], Iterator[Any]], count: int) -> Iterator[Any]:
    """Answers of so many processes, in order; when the iterator is closed they end.

    Raises ``WorkerLostError`` after the last answer before one whose process is gone.
    """
    with processes(count) as executor:
        begun: dict[int, Any] = {}
        found = answers(executor)
        try:
            for each in found:
                begun = begun or dict(getattr(executor, "_processes", None) or {})
                yield each
        except WorkerLostError as error:
            msg = (
                f"num_jobs: one of the processes {_how_it_ended(begun)}, and the rows from here on are missing: "
                "try fewer, which need less memory"
            )
            raise WorkerLostError(msg) from error


def _how_it_ended(begun: Mapping[int, Any]) -> str:
    """By the exit codes; the pool itself ends those that are left with ``SIGTERM``.

    The pool's thread waits for them too, and who comes second is told of the code a moment later.
    """
    end = time.monotonic() + PATIENCE_S
    while any(each.exitcode is None for each in begun.values()) and time.monotonic() < end:
        time.sleep(0.01)
    codes = {each.exitcode for each in begun.values()} - {0, None, -signal.SIGTERM}
    code = min(codes, default=0)
    if code < 0 and -code in set(signal.Signals):
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "is gone"


def _begin(reading: "Connection[Any, Any]", writing: "Connection[Any, Any]") -> None:
    """What a process does first. Ctrl-C reaches every process of a terminal; what becomes of these is the first one's affair."""
    writing.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_first, args=(reading,), daemon=True).start()


def _end_with_the_first(reading: "Connection[Any, Any]") -> None:
    try:
        reading.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
