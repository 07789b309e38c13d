"""``memplan plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Never

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    CpuMemoryOption,
    FamilyOption,
    GpuMemoryOption,
    LegendOption,
    ModelArgument,
    NumLabelsOption,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.pictures import (
    ChartOption,
    ReportOption,
    check_pictures,
    print_charts,
    write_page,
)
from memplan.cli.sweep_options import (
    AllowOption,
    CheckpointingAxis,
    EmitOption,
    EngineAxis,
    GlobalBatchOption,
    GpuNames,
    GpusAxis,
    PrecisionAxis,
    RowFormat,
    RowFormatOption,
    ZeroAxis,
    axis_option,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_setting_axes, takes_times
from memplan.cli.terminal import remark, say, say_legend
from memplan.cli.training_options import (
    PresetOption,
    SetupFileOption,
    TrainingArgumentsOption,
)
from memplan.errors import UsageError
from memplan.options.panels import OUTPUT_PANEL, PARALLEL_PANEL
from memplan.options.planning import PLANNED_FIELDS
from memplan.options.settings import read_tokens
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.model.spec import ModelSpec
    from memplan.search.goal import Plan, PlannedSetup

PLAN_PANEL = "Goal"


def degrees_option(name: str, also: str, what: str) -> Any:
    """An option that takes degrees of one kind."""
    return typer.Option(
        name,
        also,
        metavar="LIST",
        help=f"{what}: 1,2,4 or 1..8. [default: what is usual, where that is faster or all that fits]",
        rich_help_panel=PARALLEL_PANEL,
        show_default=False,
    )


@takes_times
@takes_setting_axes(without=PLANNED_FIELDS)
def plan(
    ctx: typer.Context,
    model: ModelArgument,
    num_gpus: GpusAxis = None,
    gpu: GpuNames = None,
    gpu_memory: GpuMemoryOption = None,
    cpu_memory: CpuMemoryOption = None,
    objective: Annotated[
        str,
        axis_option(
            "--objective", "What comes first: speed, cost, gpus or batch.", "WHAT", PLAN_PANEL
        ),
    ] = "speed",
    maximize: Annotated[
        str | None,
        axis_option(
            "--maximize",
            "Find the largest batch, seq-len or layers (in each stack) that fit.",
            "WHAT",
            PLAN_PANEL,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Sequences of one micro-batch, with --maximize seq-len or layers.",
            rich_help_panel=PLAN_PANEL,
        ),
    ] = 1,
    allow: AllowOption = None,
    headroom: Annotated[
        str,
        axis_option("--headroom", "Memory to keep free besides, such as 5%.", "SHARE", PLAN_PANEL),
    ] = "0%",
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=1, help="Setups to show.", rich_help_panel=PLAN_PANEL
        ),
    ] = 10,
    global_batch_size: GlobalBatchOption = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            parser=read_tokens,
            help="Tokens of a sequence. [default: the context, at most 2048]",
            rich_help_panel=PLAN_PANEL,
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        str | None,
        degrees_option("--tensor-parallel", "--tp", "GPUs that split each layer between them"),
    ] = None,
    pipeline_parallel: Annotated[
        str | None,
        degrees_option("--pipeline-parallel", "--pp", "Stages that layers are shared out to"),
    ] = None,
    virtual_stages: Annotated[
        str | None,
        degrees_option("--virtual-stages", "--vp", "Stages of one GPU of a pipeline"),
    ] = None,
    context_parallel: Annotated[
        str | None,
        degrees_option("--context-parallel", "--cp", "GPUs that split each sequence between them"),
    ] = None,
    expert_parallel: Annotated[
        str | None,
        degrees_option("--expert-parallel", "--ep", "GPUs that experts are shared out to"),
    ] = None,
    engine: EngineAxis = None,
    zero: ZeroAxis = None,
    precision: PrecisionAxis = None,
    checkpointing: CheckpointingAxis = None,
    settings: Values = NO_SETTINGS,
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
    legend: LegendOption = False,
    output_format: RowFormatOption = RowFormat.TABLE,
    report: ReportOption = None,
    chart: ChartOption = False,
    emit: EmitOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Where --emit writes; without it front.svg or front.html, in which memory is drawn "
            "against time.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    times: Values = NO_SETTINGS,
) -> None:
    """Search for the setups that fit, best first, and what would make the rest fit."""
    from memplan.cli.unused import refuse_unused, refuse_without

    if emit is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - EMIT_IGNORES)
    elif not (output or "").lower().endswith(DRAWN):
        refuse_without(ctx, {"output"}, "--emit (front.svg and front.html go without)")
    check_pictures(report, chart=chart, is_table=output_format is RowFormat.TABLE)
    from memplan.cli.asked import asked_of
    from memplan.options.planning import plan_question
    from memplan.search.planner import plan as make_plan

    if output is not None and emit is None:
        refuse_unused(ctx, "--output", ctx.params.keys() - DRAWING_IGNORES)
    asked = plan_question(asked_of(ctx), remark=remark)
    if len(asked.gpus) > 1 and (report is not None or (output is not None and emit is None)):
        what = "--output: a drawing" if report is None else "--report: a page"
        msg = f"{what} is of one GPU: name one"
        raise UsageError(msg)
    from memplan.cli.progress import waiting

    with waiting("looking through engines, stages, checkpointing and batches"):
        plans = [make_plan(asked.model, asked.goal, each, times=asked.times) for each in asked.gpus]
    if emit is not None:
        from memplan.cli.emitting import emit_answer

        emit_answer(_chosen(plans, emit).estimate, emit, output, asked.times)
        return
    if output is not None:
        say(_draw(plans[0], Path(output), asked.times, option="--output"))
        return
    written = ""
    if report is not None and plans[0].front:
        written = _draw(plans[0], report, asked.times, option="--report")
    known = any(each.time is not None for found in plans for each in found.setups)
    _show(plans, asked.model, output_format, asked.times if asked.shows_times or known else None)
    say_legend(legend, is_table=output_format is RowFormat.TABLE)
    if chart:
        from memplan.report.pictures.scatter import front_picture

        print_charts([front_picture(each) for each in plans])
    if written:
        say(written)
    elif report is not None:
        _refuse_to_draw("--report")


DRAWING_IGNORES = frozenset({"chart", "legend", "output_format", "report"})
"""What is not looked at where a drawing is written instead."""
EMIT_IGNORES = DRAWING_IGNORES | {"limit"}
"""What is not looked at where a setup is written down instead."""
DRAWN = (".svg", ".html", ".htm")
"""Endings of files that memory against time is drawn in."""


def _draw(found: "Plan", file: Path, question: "TimeQuestion | None", *, option: str) -> str:
    """Write memory against time as a page, or as a drawing, by what the file's name ends in; returns what is to be said.

    Raises ``InputError`` where no setup has a time.
    """
    from memplan import __version__
    from memplan.report.front import front_page
    from memplan.report.pictures.scatter import front_picture

    if not found.front:
        _refuse_to_draw(option)
    is_drawing = file.suffix.lower() == ".svg"
    text = (
        front_picture(found).svg
        if is_drawing
        else front_page(found, version=__version__, question=question)
    )
    return write_page(text, file, option=option)


def _refuse_to_draw(option: str) -> Never:
    from memplan.errors import InputError

    msg = f"{option}: nothing fits whose time is known, so there is nothing to draw"
    raise InputError(msg)


OWN_KERNELS = ("torchtitan", "megatron", "deepspeed+megatron")
"""What is written for a code base that runs its own kernels, and takes no others."""


def _chosen(plans: "list[Plan]", emit: str) -> "PlannedSetup":
    """The best setup, to be written down; for a code base with kernels of its own the best without others."""
    from memplan.errors import SetupError, UsageError

    if len(plans) > 1:
        msg = "--emit: writes one setup: name one GPU with --gpu"
        raise UsageError(msg)
    if not plans[0].setups:
        msg = "--emit: nothing fits, so there is no setup to write"
        raise SetupError(msg)
    setups, base = plans[0].setups, plans[0].goal.base
    plain = [each for each in setups if each.setup.kernels == base.kernels]
    return plain[0] if emit in OWN_KERNELS and plain else setups[0]


def _show(
    plans: "list[Plan]",
    model: "ModelSpec",
    output_format: RowFormat,
    question: "TimeQuestion | None",
) -> None:
    if output_format is RowFormat.TABLE:
        from memplan.report.console import TerminalConsole
        from memplan.report.plan import print_plan

        console = TerminalConsole()
        for each in plans:
            print_plan(console, each, question=question)
        return
    from memplan.cli.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.plan import markdown_columns, plan_rows
    from memplan.report.stream import csv_lines, json_document, json_lines, markdown_lines

    rows = (row for each in plans for row in plan_rows(each, question))
    if output_format is RowFormat.JSON:
        lines = json_document(
            rows,
            schema_version=SCHEMA_VERSION,
            assumptions=lambda: plans[0].assumptions,
            about=about(model),
        )
    elif output_format is RowFormat.JSONL:
        lines = json_lines(rows)
    elif output_format is RowFormat.CSV:
        lines = csv_lines(rows)
    else:
        lines = markdown_lines(rows, markdown_columns(question))
    for line in lines:
        say(line)
