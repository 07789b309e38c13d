"""What shows on stderr, in a terminal, that something takes longer than a moment: a bar, or a word."""

import sys
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memplan.search.sweep import Sweep, SweepResult

PATIENCE_S = 0.5
"""How long nothing is shown."""
STEP = 16
"""Results between two looks at the clock."""


def with_progress(sweep: "Sweep", *, alone: bool) -> "Iterator[SweepResult]":
    """Hand the results on, with a bar once they take their time.

    None where stderr is no terminal; nor, unless the bar is ``alone`` on it, where stdout is one.
    """
    if not sys.stderr.isatty() or not (alone or not sys.stdout.isatty()):
        return iter(sweep)
    return _watched(sweep)


def _watched(sweep: "Sweep") -> "Iterator[SweepResult]":
    start = monotonic()
    results = iter(sweep)
    for number, result in enumerate(results):
        yield result
        if number % STEP == STEP - 1 and monotonic() - start > PATIENCE_S:
            yield from _with_bar(sweep, results)


def _with_bar(sweep: "Sweep", results: "Iterator[SweepResult]") -> "Iterator[SweepResult]":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from memplan.report.terminal.rich_console import PrintableConsole

    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} setups"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(
        *columns,
        console=PrintableConsole(stderr=True),
        transient=True,
        redirect_stdout=False,  # else rows written meanwhile would end up on stderr
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("", total=sweep.num_combinations, completed=sweep.num_tried)
        for result in results:
            yield result
            bar.update(task, completed=sweep.num_tried)


@contextmanager
def waiting(words: str) -> "Iterator[None]":
    """Say what is waited for, once it takes its time and where stderr is a terminal; gone at the end.

    Nothing is said where memplan is a library in somebody else's process.
    """
    from memplan import cli

    if not cli.owns_process or not sys.stderr.isatty():
        yield
        return
    from threading import Timer

    def show() -> None:
        sys.stderr.write(f"{words} ...")
        sys.stderr.flush()
        shown.append(len(words) + len(" ..."))

    shown: list[int] = []
    timer = Timer(PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for width in shown:
            sys.stderr.write(f"\r{' ' * width}\r")
            sys.stderr.flush()
