"""``memplan sweep``."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.output.pictures import check_pictures, print_charts, sweep_report, write_report
from memplan.cli.output.terminal import remark, say, say_legend
from memplan.cli.taking import NO_VALUES, Argument, Context, takes
from memplan.errors import WorkerLostError
from memplan.fast_dataclass import dataclass
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.questions import SWEEP
from memplan.options.rows.shared import CHECKS, JOBS, LEGEND, PICTURES, ROW_FORMAT, SHARD, RowFormat
from memplan.options.run_times import TIME_OPTIONS, time_question
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from memplan.cli.output.checking import Checks
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.pivot import Pivot
    from memplan.search.sweep import Sweep, SweepResult

PIVOT = Option(
    flag="--pivot", kind=str | None, metavar="FIGURE|ROWS,COLUMNS", panel=OUTPUT_PANEL,
    help_text="A matrix of one figure (peak, total, headroom, host, activations or textbook), "
    "batch by GPUs, or by what is named: seq-len,batch or total,seq-len,batch.",
)  # fmt: skip


OUTPUT = Option(
    flag="--output", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
    help_text="Append rows to this JSONL file as they are made, in place of a table.",
)  # fmt: skip
RESUME = Option(
    flag="--resume", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
    help_text="Go on where a run that was killed stopped writing --output.",
)  # fmt: skip
DASK = Option(
    flag="--dask", kind=str | None, metavar="ADDRESS", panel=OUTPUT_PANEL,
    help_text="Have a Dask cluster do the work: tcp://host:8786.",
)  # fmt: skip


ARGUMENT = Argument(
    metavar="MODEL|SWEEP.YAML",
    help_text="A model as `memplan estimate` takes it, or a YAML file that describes a sweep.",
)


@takes(
    *SWEEP, PIVOT, LEGEND, ROW_FORMAT, *PICTURES, *CHECKS, *TIME_OPTIONS, JOBS, DASK, SHARD, OUTPUT, RESUME,
    argument=ARGUMENT,
)  # fmt: skip
def sweep(
    ctx: Context,
    model: str,
    values: Values = NO_VALUES,
) -> None:
    """Estimate a grid of setups on several GPUs, as a table, a matrix or rows for scripts."""
    from memplan.cli.output.checking import read_checks
    from memplan.cli.words.asked import asked_of

    wanted = Wanted(
        output_format=values["format"],
        checks=read_checks(values),
        pivot=_read_pivot(values["pivot"], values["format"]),
        question=time_question(values),
        pictured=Pictured(report=values["report"], chart=values["chart"]),
    )
    check_pictures(values)
    _check_use(ctx, values)
    from memplan.options.numbers import shard_of
    from memplan.options.sweeping import sweep_question
    from memplan.search.sweep import Sweep

    asked = sweep_question(asked_of(ctx), judges=True, remark=remark)
    with _executor(values["dask"]) as executor:
        made = Sweep(
            asked.model,
            asked.grid,
            asked.gpus,
            num_jobs=_processes(values["jobs"]),
            node_memory_bytes=asked.node_memory_bytes,
            executor=executor,
            part=shard_of(asked.grid.num_combinations, values["shard"]),
        )
        if values["output"] is not None:
            from memplan.cli.output.sweep_file import write_rows

            write_rows(made, Path(values["output"]), wanted.question, resumes=values["resume"])
            return
        _show(made, wanted)
    say_legend(values["legend"], is_table=values["format"] is RowFormat.TABLE)


FILE_IGNORES = frozenset({
    "format", "pivot", "legend", "report", "chart", "check", "fail_on", "baseline", "tolerance", "unmatched", "annotate",
})  # fmt: skip
"""What is not looked at where rows go to a file."""


def _check_use(ctx: Context, values: Values) -> None:
    """Raise ``UsageError`` for what was given and plays no part."""
    from memplan.cli.words.unused import refuse_unused, refuse_without

    if values["output"] is None:
        refuse_without(ctx, {"resume"}, "--output")
    else:
        refuse_unused(ctx, "--output", ctx.params.keys() - FILE_IGNORES)
    if values["dask"] is not None:
        refuse_unused(ctx, "--dask", ctx.params.keys() - {"jobs"})


@contextmanager
def _executor(address: str | None) -> "Iterator[Executor | None]":
    """The cluster's, where one is named."""
    if address is None:
        yield None
        return
    from memplan.cli.cluster import dask_executor

    with dask_executor(address) as executor:
        yield executor


def _processes(jobs: int) -> int:
    if jobs:
        return jobs
    from memplan.search.in_parallel.cores import usable_cores

    return usable_cores()


def _read_pivot(text: str | None, output_format: RowFormat) -> "Pivot | None":
    """A figure, the axes of a matrix, or both, joined by commas.

    Raises ``UsageError`` for a word that is neither, and for one axis alone.
    """
    if text is None:
        return None
    from memplan.errors import UsageError, did_you_mean
    from memplan.report.pivot import PIVOT_AXES, Figure, Pivot

    if output_format is not RowFormat.TABLE:
        msg = "--pivot: a matrix is for people; leave it out, or leave out --format"
        raise UsageError(msg)
    figures = [each.value for each in Figure]
    words = [word.strip() for word in text.split(",")]
    figure = Figure(words.pop(0)) if words[0] in figures else Figure.PEAK
    if not words:
        return Pivot(figure=figure)
    for word in words:
        if word not in PIVOT_AXES:
            known = (*PIVOT_AXES, *(figures if word == text.split(",")[0].strip() else ()))
            msg = f"--pivot: {word!r} is not one of {', '.join(known)}.{did_you_mean(word, known)}"
            raise UsageError(msg)
    if len(words) != 2 or words[0] == words[1]:
        msg = f"--pivot: {text!r}: name the rows and the columns, two different ones: seq-len,batch"
        raise UsageError(msg)
    return Pivot(figure=figure, rows=words[0], columns=words[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictured:
    """How the answer is drawn besides."""

    report: str | None
    chart: bool

    @contextmanager
    def beside(self, sweep: "Sweep", results: "Sequence[SweepResult]") -> "Iterator[None]":
        """Write the page that is asked for, then print the charts below what is printed inside."""
        if not self.chart and self.report is None:
            yield
            return
        from memplan.report.pictures.heat import heat_picture

        pictures = heat_picture(sweep, results=results)
        written = ""
        if self.report is not None:
            written = write_report(
                self.report,
                page=lambda: sweep_report(pictures, sweep.model.name),
                drawings=lambda: pictures,
            )
        yield
        if self.chart:
            print_charts(pictures)
        if written:
            say(written)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How the answer is written and judged."""

    output_format: RowFormat
    checks: "Checks"
    pivot: "Pivot | None"
    question: "TimeQuestion | None"
    pictured: Pictured

    def __post_init__(self) -> None:
        if self.question is not None and self.pivot is not None:
            from memplan.errors import UsageError

            msg = "--pivot: a matrix shows memory alone: leave out the options of time"
            raise UsageError(msg)


def _show(sweep: "Sweep", wanted: Wanted) -> None:
    """Write the results, then judge them.

    Raises ``WorkerLostError`` behind the results that there are.
    """
    from memplan.cli.output.progress import with_progress

    is_table = wanted.output_format is RowFormat.TABLE
    done = _Done(with_progress(sweep, alone=is_table))
    try:
        _write(sweep, wanted.checks.watch(iter(done)), wanted)
    except KeyboardInterrupt:  # between two results, where a row is being written
        done.is_interrupted = True
    if done.loss is not None:
        raise done.loss
    if done.is_interrupted:
        whole = f"{sweep.num_tried:,} of {sweep.num_combinations:,} setups"
        remark(f"interrupted: what was done by then is shown, {whole}")
        raise KeyboardInterrupt
    wanted.checks.finish(sys.stdout if is_table else sys.stderr, sweep.model)


class _Done:
    """The results up to the end, or up to where a process that was at work, or this one, was ended."""

    def __init__(self, results: "Iterable[SweepResult]") -> None:
        self._results = results
        self.loss: WorkerLostError | None = None
        self.is_interrupted = False

    def __iter__(self) -> "Iterator[SweepResult]":
        try:
            yield from self._results
        except WorkerLostError as error:
            self.loss = error
        except KeyboardInterrupt:
            self.is_interrupted = True


def _write(sweep: "Sweep", results: "Iterable[SweepResult]", wanted: Wanted) -> None:
    if wanted.output_format is RowFormat.TABLE:
        kept = list(results)
        if kept:
            _print(sweep, kept, wanted)
        return
    from memplan.report.sweep import impossible_notes, sweep_rows

    rows = wanted.checks.rows(sweep_rows(results, wanted.question))
    for line in _lines(rows, wanted.output_format, sweep, wanted.question):
        say(line)
    for note in impossible_notes(sweep):
        remark(note)


def _print(sweep: "Sweep", kept: "list[SweepResult]", wanted: Wanted) -> None:
    from memplan.report.terminal.console import TerminalConsole

    console = TerminalConsole()
    with wanted.pictured.beside(sweep, kept):
        if wanted.pivot is None:
            from memplan.report.sweep import print_sweep

            print_sweep(console, sweep, kept, question=wanted.question)
        else:
            from memplan.report.pivot import print_pivot

            print_pivot(console, sweep, kept, wanted.pivot)


def _lines(
    rows: Iterable[Mapping[str, object]],
    output_format: RowFormat,
    sweep: "Sweep",
    question: "TimeQuestion | None",
) -> Iterable[str]:
    from memplan.cli.output.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.rows.stream import csv_lines, json_document, json_lines, markdown_lines
    from memplan.report.sweep import MARKDOWN_COLUMNS

    if output_format is RowFormat.JSON:
        return json_document(
            rows,
            schema_version=SCHEMA_VERSION,
            assumptions=lambda: sweep.assumptions,
            about=about(sweep.model),
        )
    if output_format is RowFormat.JSONL:
        return json_lines(rows)
    if output_format is RowFormat.CSV:
        return csv_lines(rows)
    host = () if sweep.node_memory_bytes is None else ("host_verdict",)
    told: tuple[str, ...] = ()
    if question is not None:
        from memplan.report.estimates.times import time_keys

        told = time_keys(question)
    return markdown_lines(rows, (*MARKDOWN_COLUMNS, *host, *told))
