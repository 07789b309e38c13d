"""Rows that a sweep writes as they are made, a JSON object on a line, and how far a file of them goes.

A setup's rows, one for each card, are appended by one write and are there when it returns. Whoever is killed in between
leaves a line without its end at most; it and the rest of its setup are dropped when the sweep goes on.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass

NUMBER = "combination"
"""Key of a row: which combination of the grid it is of, in the grid's order from 0."""
TAIL_BYTES = 1 << 20
"""What is read first of a file's end: rows of one setup on a few hundred cards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a file holds whole."""

    size: int
    """Up to the end of the last setup that is there with all its rows [bytes]."""
    dropped_bytes: int
    """What follows that, of a setup that is not."""
    last: tuple[Mapping[str, Any], ...]
    """The rows of that setup; none in a file without any."""

    @property
    def number(self) -> int | None:
        """Of its combination; None in a file without any."""
        return self.last[0][NUMBER] if self.last else None


def read_written(path: Path, *, num_cards: int) -> Written:
    """How far a file goes; nothing is there where there is no file.

    Raises ``InputError`` for a file that holds something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            tail = min(size, TAIL_BYTES)
            while True:
                file.seek(size - tail)
                found = _written(file.read(tail), size, num_cards, is_whole=tail == size)
                if found is not None:
                    return found
                tail = min(size, 4 * tail)
    except FileNotFoundError:
        return Written(size=0, dropped_bytes=0, last=())
    except OSError as error:
        msg = f"output: {path} cannot be read: {error.strerror}"
        raise InputError(msg) from None
    except ValueError as error:
        msg = f"resume: {path} holds no rows of a sweep ({error}): name another file"
        raise InputError(msg) from None


def _written(data: bytes, size: int, num_cards: int, *, is_whole: bool) -> Written | None:
    """What the end of a file says; None where more of it is needed. Raises ``ValueError`` for what is no row."""
    lines = data.splitlines(keepends=True)
    if not is_whole:
        lines = lines[1:]  # it begins anywhere
    end = size
    if lines and not lines[-1].endswith(b"\n"):
        end -= len(lines.pop())
    while lines:
        rows = [_row(each) for each in lines[-num_cards:]]
        numbers = [row[NUMBER] for row in rows]
        if len(rows) == num_cards and len(set(numbers)) == 1:
            return Written(size=end, dropped_bytes=size - end, last=tuple(rows))
        # The last setup lacks rows.
        while lines and _row(lines[-1])[NUMBER] == numbers[-1]:
            end -= len(lines.pop())
    return Written(size=0, dropped_bytes=size, last=()) if is_whole else None


def _row(line: bytes) -> Mapping[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get(NUMBER), int):
        msg = f"a line has no {NUMBER!r}"
        raise ValueError(msg)  # noqa: TRY004 - said of the file, as what is no JSON
    return row


def _take(descriptor: int) -> None:
    """Raise ``OSError`` where another process writes to it: rows would be there twice."""
    try:
        import fcntl
    except ImportError:  # Windows lets two write
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(0, "another process writes to it") from None


class RowsFile:
    """A file that rows are appended to."""

    def __init__(self, path: Path, *, size: int) -> None:
        """Open it, cut to ``size``. Raises ``InputError`` where it cannot be written."""
        self._path = path
        self.num_rows = 0
        """Appended since."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            _take(self._descriptor)
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise self._refused(error) from None

    def append(self, rows: Iterable[Mapping[str, object]], number: int) -> None:
        """Write a setup's rows, all at once. Raises ``InputError`` where the disk is full or gone."""
        lines = [json.dumps({NUMBER: number, **row}) for row in rows]
        left = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise self._refused(error) from None
        self.num_rows += len(lines)

    def close(self) -> None:
        """What was appended is there already."""
        os.close(self._descriptor)

    def _refused(self, error: OSError) -> InputError:
        return InputError(f"output: {self._path} cannot be written: {error.strerror}")
