"""``memplan sweep``."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    CpuMemoryOption,
    FamilyOption,
    GpuMemoryOption,
    LegendOption,
    NumLabelsOption,
    RevisionOption,
    TaskOption,
    TokenOption,
    complete_models,
)
from memplan.cli.pictures import (
    ChartOption,
    ReportOption,
    check_pictures,
    print_charts,
    sweep_report,
    write_page,
)
from memplan.cli.sweep_options import (
    AnnotateOption,
    BaselineOption,
    CheckOption,
    EngineAxis,
    FailOnOption,
    FsdpStrategyAxis,
    GlobalBatchOption,
    GpuNames,
    GpusAxis,
    JobsOption,
    NodesAxis,
    OffloadAxis,
    OffloadParamAxis,
    PrecisionAxis,
    RowFormat,
    RowFormatOption,
    ToleranceOption,
    UnmatchedOption,
    ZeroAxis,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_setting_axes, takes_times
from memplan.cli.terminal import remark, say, say_legend
from memplan.cli.training_options import (
    EngineOptionOption,
    PresetOption,
    SetupFileOption,
    TrainingArgumentsOption,
)
from memplan.errors import WorkerLostError
from memplan.fast_dataclass import dataclass
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.run_times import time_question
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.cli.checking import Checks
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.report.pivot import Pivot
    from memplan.search.sweep import Sweep, SweepResult


@takes_times
@takes_setting_axes()
def sweep(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SWEEP.YAML",
            help="A model as `memplan estimate` takes it, or a YAML file that describes a sweep.",
            show_default=False,
            autocompletion=complete_models,
        ),
    ],
    num_gpus: GpusAxis = None,
    num_nodes: NodesAxis = None,
    gpu: GpuNames = None,
    gpu_memory: GpuMemoryOption = None,
    cpu_memory: CpuMemoryOption = None,
    engine: EngineAxis = None,
    zero: ZeroAxis = None,
    fsdp_strategy: FsdpStrategyAxis = None,
    offload: OffloadAxis = None,
    offload_param: OffloadParamAxis = None,
    settings: Values = NO_SETTINGS,
    global_batch_size: GlobalBatchOption = None,
    precision: PrecisionAxis = None,
    engine_option: EngineOptionOption = None,
    setup: SetupFileOption = None,
    preset: PresetOption = None,
    training_args: TrainingArgumentsOption = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    pivot: Annotated[
        str | None,
        typer.Option(
            "--pivot",
            metavar="FIGURE|ROWS,COLUMNS",
            help="A matrix of one figure (peak, total, headroom, host, activations or textbook), "
            "batch by GPUs, or by what is named: seq-len,batch or total,seq-len,batch.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    legend: LegendOption = False,
    output_format: RowFormatOption = RowFormat.TABLE,
    report: ReportOption = None,
    chart: ChartOption = False,
    check: CheckOption = None,
    fail_on: FailOnOption = None,
    baseline: BaselineOption = None,
    tolerance: ToleranceOption = None,
    unmatched: UnmatchedOption = None,
    annotate: AnnotateOption = None,
    times: Values = NO_SETTINGS,
    jobs: JobsOption = 1,
) -> None:
    """Estimate a grid of setups on several GPUs, as a table, a matrix or rows for scripts."""
    from memplan.cli.checking import read_checks

    checks = read_checks(check, fail_on, baseline, tolerance, unmatched, annotate)
    matrix = _read_pivot(pivot, output_format)
    check_pictures(report, chart=chart, is_table=output_format is RowFormat.TABLE)
    question = time_question(times)
    if question is not None and matrix is not None:
        from memplan.errors import UsageError

        msg = "--pivot: a matrix shows memory alone: leave out the options of time"
        raise UsageError(msg)
    from memplan.cli.asked import asked_of
    from memplan.options.sweeping import sweep_question
    from memplan.search.sweep import Sweep

    asked = sweep_question(asked_of(ctx), judges=True, remark=remark)
    made = Sweep(
        asked.model,
        asked.grid,
        asked.gpus,
        num_jobs=_processes(jobs),
        node_memory_bytes=asked.node_memory_bytes,
    )
    pictured = Pictured(report=report, chart=chart)
    _show(made, output_format, matrix, checks, question, pictured)
    say_legend(legend, is_table=output_format is RowFormat.TABLE)


def _processes(jobs: int) -> int:
    if jobs:
        return jobs
    from memplan.search.cores import usable_cores

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

    report: Path | None
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
            written = write_page(sweep_report(pictures, sweep.model.name), self.report)
        yield
        if self.chart:
            print_charts(pictures)
        if written:
            say(written)


def _show(
    sweep: "Sweep",
    output_format: RowFormat,
    pivot: "Pivot | None",
    checks: "Checks",
    question: "TimeQuestion | None",
    pictured: "Pictured",
) -> None:
    """Write the results, then judge them.

    Raises ``WorkerLostError`` behind the results that there are.
    """
    from memplan.cli.progress import with_progress

    done = _Done(with_progress(sweep, alone=output_format is RowFormat.TABLE))
    _write(sweep, checks.watch(iter(done)), output_format, pivot, checks, question, pictured)
    if done.loss is not None:
        raise done.loss
    if done.is_interrupted:
        whole = f"{sweep.num_tried:,} of {sweep.num_combinations:,} setups"
        remark(f"interrupted: what was done by then is shown, {whole}")
        raise KeyboardInterrupt
    checks.finish(sys.stdout if output_format is RowFormat.TABLE else sys.stderr, sweep.model)


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


def _write(
    sweep: "Sweep",
    results: "Iterable[SweepResult]",
    output_format: RowFormat,
    pivot: "Pivot | None",
    checks: "Checks",
    question: "TimeQuestion | None",
    pictured: "Pictured",
) -> None:
    if output_format is RowFormat.TABLE:
        from memplan.report.console import TerminalConsole

        console, kept = TerminalConsole(), list(results)
        if not kept:
            return
        with pictured.beside(sweep, kept):
            if pivot is None:
                from memplan.report.sweep import print_sweep

                print_sweep(console, sweep, kept, question=question)
            else:
                from memplan.report.pivot import print_pivot

                print_pivot(console, sweep, kept, pivot)
        return
    from memplan.report.sweep import impossible_notes, sweep_rows

    rows = checks.rows(sweep_rows(results, question))
    for line in _lines(rows, output_format, sweep, question):
        say(line)
    for note in impossible_notes(sweep):
        remark(note)


def _lines(
    rows: Iterable[Mapping[str, object]],
    output_format: RowFormat,
    sweep: "Sweep",
    question: "TimeQuestion | None",
) -> Iterable[str]:
    from memplan.cli.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.stream import csv_lines, json_document, json_lines, markdown_lines
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
        from memplan.report.times import time_keys

        told = time_keys(question)
    return markdown_lines(rows, (*MARKDOWN_COLUMNS, *host, *told))
