"""``sweep --output``: rows that are there as soon as they are made, so that a killed run goes on where it stopped."""

import sys
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from memplan.cli.output.terminal import remark
from memplan.errors import InputError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.search.sweep import Sweep
    from memplan.sources.rows_file import RowsFile, Written

INTERVAL_S = 30.0
"""Between two lines that say how far it is."""


def write_rows(
    sweep: "Sweep", path: Path, question: "TimeQuestion | None", *, resumes: bool
) -> None:
    """Append the sweep's rows to a file, from where it ends if the sweep goes on.

    Raises ``InputError`` for a file that is there and not to be gone on with, or is of another sweep, and
    ``WorkerLostError`` behind what was written.
    """
    from memplan.report.sweep import impossible_notes, sweep_rows
    from memplan.sources.rows_file import read_written

    if not resumes and path.is_file() and path.stat().st_size:
        msg = f"--output: {path} is there already: add --resume to go on, or name another file"
        raise InputError(msg)
    written = read_written(path, num_cards=max(1, len(sweep.gpus)))
    _check_same(sweep, written, path, question)
    first = sweep.part.start if written.number is None else written.number + 1
    done = first - sweep.part.start
    rest = sweep.from_number(first)
    if resumes:
        torn = (
            f"; {written.dropped_bytes:,} bytes of a setup that was not whole are dropped"
            if written.dropped_bytes
            else ""
        )
        remark(f"{path}: goes on behind {done:,} of {sweep.num_combinations:,} setups{torn}")
    with _opened(path, written) as file, _told(rest, done) as tell:
        try:
            for result in rest:
                file.append(sweep_rows([result], question), rest.number)
                tell()
        except KeyboardInterrupt:
            remark(f"interrupted: --resume goes on behind what {path} has")
            raise
        except WorkerLostError as error:
            msg = f"{error}: --resume goes on behind what {path} has"
            raise WorkerLostError(msg) from error
        for note in impossible_notes(rest):
            remark(note)
        remark(f"{path}: {file.num_rows:,} rows of {rest.num_combinations:,} setups")


@contextmanager
def _opened(path: Path, written: "Written") -> "Iterator[RowsFile]":
    from memplan.sources.rows_file import RowsFile

    file = RowsFile(path, size=written.size)
    try:
        yield file
    finally:
        file.close()


def _check_same(
    sweep: "Sweep", written: "Written", path: Path, question: "TimeQuestion | None"
) -> None:
    """Raise ``InputError`` where the last setup of the file is none of this sweep, or came to something else."""
    import json

    from memplan.report.sweep import sweep_rows
    from memplan.sources.rows_file import NUMBER

    if written.number is None:
        return
    number = written.number
    rows: list[dict[str, object]] = []
    if number in sweep.part:
        again = sweep.from_number(number, 1)
        rows = [{NUMBER: number, **row} for row in sweep_rows(again, question)]
    made = [json.loads(json.dumps(row)) for row in rows]
    if made == list(written.last):
        return
    differing = sorted(
        key
        for one, other in zip(made, written.last, strict=False)
        for key in one.keys() | other.keys()
        if one.get(key) != other.get(key)
    )
    where = f" (setup {number:,} differs in {', '.join(differing[:3])})" if differing else ""
    msg = f"--resume: {path} is of another sweep, or another memplan{where}: name another file"
    raise InputError(msg)


@contextmanager
def _told(sweep: "Sweep", done: int) -> "Iterator[Progress]":
    """Where stderr is a terminal one line that changes, else a line now and then."""
    progress = Progress(sweep, done)
    try:
        yield progress
    finally:
        progress.end()


class Progress:
    """How far a sweep is."""

    def __init__(self, sweep: "Sweep", done: int) -> None:
        self._sweep = sweep
        self._done = done
        self._start = self._last = monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._width = 0

    def __call__(self) -> None:
        """Say it, where it was not said for a while."""
        now = monotonic()
        if now - self._last < (0.5 if self._is_terminal else INTERVAL_S):
            return
        self._last = now
        if not self._is_terminal:
            remark(self._words(now))
            return
        text = self._words(now)
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()
        self._width = len(text)

    def _words(self, now: float) -> str:
        tried, total = self._sweep.num_tried, self._sweep.num_combinations
        rate = tried / (now - self._start)
        left = (total - tried) / rate
        return f"{self._done + tried:,} of {self._done + total:,} setups, {rate:,.0f} a second, {left / 60:,.0f} min left"

    def end(self) -> None:
        """Leave the line."""
        if self._width:
            sys.stderr.write(f"\r{'':{self._width}}\r")
            sys.stderr.flush()
