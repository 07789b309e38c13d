"""Pieces of work shared with copies of this process, for ``memplan.search.in_parallel.together``."""

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Generic, NoReturn, TypeVar

from memplan.search.in_parallel.packing import packed, unpacked

ResultT = TypeVar("ResultT")


class Together(Generic[ResultT]):
    """Pieces of work, and who does them."""

    def __init__(
        self, work: Callable[[int], ResultT], count: int, shared: Sequence[object]
    ) -> None:
        self._work = work
        self._count = count
        self._shared = shared
        self._left, tokens = os.pipe()
        """A byte for each piece that nobody has taken."""
        os.write(tokens, bytes(range(count)))
        os.close(tokens)
        self._alive, self._living = os.pipe()
        """Nothing is written here: the end that this process alone holds closes when it ends."""

    def run(self, num_copies: int) -> list[ResultT]:
        """Do all of it."""
        copies = [self._copy() for _ in range(num_copies)]
        found: dict[int, ResultT] = {}
        try:
            found.update(self._pieces())
            for _, results in copies:
                found.update(self._handed_over(results))
        finally:
            for end in (self._left, self._alive, self._living):
                os.close(end)
            for process, results in copies:
                os.close(results)
                self._end(process)
        # What a copy could not do is done here, where an error can be raised.
        return [found[each] if each in found else self._work(each) for each in range(self._count)]

    def _pieces(self) -> dict[int, ResultT]:
        found: dict[int, ResultT] = {}
        while token := os.read(self._left, 1):
            found[token[0]] = self._work(token[0])
        return found

    def _copy(self) -> tuple[int, int]:
        """A copy's process, and where its results come."""
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            self._work_as_copy(writing)
        os.close(writing)
        return process, reading

    def _work_as_copy(self, writing: int) -> NoReturn:
        """Nothing of the first process happens twice: no handler runs, no buffer is written."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.close(self._living)
            Thread(target=self._end_with_the_first, daemon=True).start()
            with os.fdopen(writing, "wb") as results:
                results.write(packed(self._pieces(), self._shared))
        finally:
            os._exit(0)

    def _end_with_the_first(self) -> NoReturn:
        """What a copy finds when the first process is gone, however that ended, nobody reads."""
        os.read(self._alive, 1)
        os._exit(0)

    def _handed_over(self, results: int) -> dict[int, ResultT]:
        with os.fdopen(os.dup(results), "rb") as given:
            data = given.read()
        try:
            found: dict[int, ResultT] = unpacked(data, self._shared)
        except (EOFError, pickle.UnpicklingError):
            return {}  # it ended early
        return found

    def _end(self, process: int) -> None:
        """It has nothing left to do, or its work is not wanted any more."""
        try:
            os.kill(process, signal.SIGKILL)
        finally:
            os.waitpid(process, 0)
