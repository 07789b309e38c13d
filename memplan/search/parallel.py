"""Work spread over processes, its results in the order in which it was asked for.

Threads would not help: estimating is Python from end to end.

Each process has one connection to the first. It reads it beside its work, so that it ends at once where
the other end is closed: on purpose, or because the first process is gone, however it ended (a signal
that nothing can answer, a closed terminal). The first one reads all connections, so that a process
that is gone, half of an answer in the connection or not, is seen there and not waited for.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing import Pipe, Process, get_start_method
from multiprocessing.connection import Connection, wait
from pickle import PicklingError
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from memplan.errors import WorkerLostError
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
        """The answers, made while they are iterated over.

        Raises ``WorkerLostError`` after the last answer before one whose process is gone.
        """
        workers: list[_Worker] = []
        waiting: deque[_Chunk] = deque()
        remaining = iter(tasks)
        try:
            while True:
                while len(waiting) < CHUNKS_ON_THE_WAY * self._num_processes:
                    tasks_of_chunk = list(islice(remaining, self._chunk_size))
                    if not tasks_of_chunk:
                        break
                    if len(workers) < self._num_processes:
                        workers.append(_Worker(self._work, self._shared, workers))
                    waiting.append(_Chunk())
                    worker = min(workers, key=_Worker.num_on_the_way)
                    worker.take(waiting[-1], packed(tasks_of_chunk, self._shared))
                if not waiting:
                    return
                yield from self._first(waiting.popleft(), workers)
        finally:
            for each in workers:
                each.end()

    def _first(self, chunk: "_Chunk", workers: "Sequence[_Worker]") -> list[ResultT]:
        """The answers of the chunk that comes next."""
        while chunk.answer is None:
            if chunk.is_lost:
                raise WorkerLostError(chunk.loss)
            listening = {each.connection: each for each in workers if each.on_the_way}
            for connection in wait(list(listening)):
                listening[connection].hand_over()  # type: ignore[index]
        error, found, remark = unpacked(chunk.answer, self._shared)
        if error is not None:
            raise error from _ElsewhereError(remark)
        answers: list[ResultT] = found
        return answers


class _ElsewhereError(Exception):
    """Where an error was raised, in a process that is not this one."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Chunk:
    """Some tasks on their way."""

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.loss = ""
        """Why there will be no answer."""

    @property
    def is_lost(self) -> bool:
        return bool(self.loss)


class _Worker:
    """One process, seen from the first one."""

    def __init__(
        self,
        work: Callable[[Any], object],
        shared: Sequence[object],
        others: "Sequence[_Worker]",
    ) -> None:
        self.connection, theirs = Pipe()
        self.on_the_way: deque[_Chunk] = deque()
        self._is_gone = False
        copied = [self.connection, *(each.connection for each in others)]
        self._process = Process(
            target=_serve,
            args=(theirs, copied if get_start_method() == "fork" else [], work, shared),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def num_on_the_way(self) -> int:
        """Chunks that it has not answered; none is handed to one that is gone, while there are others."""
        return MAX_PROCESSES * CHUNKS_ON_THE_WAY if self._is_gone else len(self.on_the_way)

    def take(self, chunk: _Chunk, tasks: bytes) -> None:
        """Send it a chunk, which is lost where it is gone."""
        self.on_the_way.append(chunk)
        try:
            self.connection.send_bytes(tasks)
        except OSError:
            self._lose()

    def hand_over(self) -> None:
        """Read one answer, or see that it is gone."""
        try:
            answer = self.connection.recv_bytes()
        except (EOFError, OSError):
            self._lose()
        else:
            self.on_the_way.popleft().answer = answer

    def _lose(self) -> None:
        self._is_gone = True
        self._process.join()
        loss = _how_it_ended(self._process.exitcode)
        while self.on_the_way:
            self.on_the_way.popleft().loss = loss

    def end(self) -> None:
        """Whatever it is at is not wanted any more."""
        self.connection.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _how_it_ended(code: int | None) -> str:
    try:
        how = f"was ended by {signal.Signals(-code).name}" if code else "is gone"
    except ValueError:
        how = f"ended with exit code {code}"
    return (
        f"num_jobs: one of the processes {how}, and the rows from here on are missing: "
        "try fewer, which need less memory"
    )


def _serve(
    connection: "Connection[bytes, bytes]",
    copied: "Sequence[Connection[bytes, bytes]]",
    work: Callable[[Any], object],
    shared: Sequence[object],
) -> None:
    """What a process does.

    ``copied`` are the first process's ends of connections, which a fork has copied: nobody sees a
    connection end that has another end left here.
    """
    for each in copied:
        each.close()
    # Ctrl-C reaches every process of a terminal; what becomes of these is the first one's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chunks: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(connection, chunks), daemon=True).start()
    while True:
        answer = _answer(chunks.get(), work, shared)
        try:
            connection.send_bytes(answer)
        except OSError:
            os._exit(0)


def _listen(connection: "Connection[bytes, bytes]", chunks: "SimpleQueue[bytes]") -> None:
    """Take chunks while the other one is at work, and end with the first process."""
    try:
        while True:
            chunks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(chunk: bytes, work: Callable[[Any], object], shared: Sequence[object]) -> bytes:
    try:
        found = [work(task) for task in unpacked(chunk, shared)]
        return packed((None, found, ""), shared)
    except Exception as error:  # noqa: BLE001 - raised again where the answer is read
        told = traceback.format_exc()
        try:
            return packed((error, None, told), shared)
        except (PicklingError, TypeError, AttributeError):
            return packed((RuntimeError(repr(error)), None, told), shared)
