"""``memplan plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Never

import typer

from memplan.cli.pictures import check_pictures, print_charts, write_page
from memplan.cli.taking import NO_VALUES, ModelArgument, takes
from memplan.cli.terminal import remark, say, say_legend
from memplan.errors import UsageError
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.questions import PLAN
from memplan.options.run_times import TIME_OPTIONS
from memplan.options.shared import EMIT, LEGEND, PICTURES, ROW_FORMAT, RowFormat
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.model.spec import ModelSpec
    from memplan.options.planning import PlanQuestion
    from memplan.search.goal import Plan, PlannedSetup

OUTPUT = Option(
    flag="--output", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
    help_text="Where --emit writes; without it front.svg or front.html, in which memory is drawn "
    "against time.",
)  # fmt: skip


@takes(*PLAN, LEGEND, ROW_FORMAT, *PICTURES, EMIT, OUTPUT, *TIME_OPTIONS)
def plan(ctx: typer.Context, model: ModelArgument, values: Values = NO_VALUES) -> None:
    """Search for the setups that fit, best first, and what would make the rest fit."""
    _check_use(ctx, values)
    from memplan.cli.asked import asked_of
    from memplan.cli.progress import waiting
    from memplan.options.planning import plan_question
    from memplan.search.planner import plan as make_plan

    emit, output, report = values["emit"], values["output"], values["report"]
    asked = plan_question(asked_of(ctx), remark=remark)
    if len(asked.gpus) > 1 and (report is not None or (output is not None and emit is None)):
        what = "--output: a drawing" if report is None else "--report: a page"
        msg = f"{what} is of one GPU: name one"
        raise UsageError(msg)
    with waiting("looking through engines, stages, checkpointing and batches"):
        plans = [make_plan(asked.model, asked.goal, each, times=asked.times) for each in asked.gpus]
    if emit is not None:
        from memplan.cli.emitting import emit_setup

        emit_setup(_chosen(plans, emit).setup, asked.model, emit, output)
    elif output is not None:
        say(_draw(plans[0], output, asked.times, option="--output"))
    else:
        _answer(plans, asked, values)


def _check_use(ctx: typer.Context, values: Values) -> None:
    """Raise ``UsageError`` for what was given and plays no part."""
    from memplan.cli.unused import refuse_unused, refuse_without

    emit, output = values["emit"], values["output"]
    if emit is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - EMIT_IGNORES)
    elif not (output or "").lower().endswith(DRAWN):
        refuse_without(ctx, {"output"}, "--emit (front.svg and front.html go without)")
    check_pictures(values)
    if output is not None and emit is None:
        refuse_unused(ctx, "--output", ctx.params.keys() - DRAWING_IGNORES)


def _answer(plans: "list[Plan]", asked: "PlanQuestion", values: Values) -> None:
    """Write the plans, and what is drawn of them."""
    report, output_format = values["report"], values["format"]
    written = ""
    if report is not None and plans[0].front:
        written = _draw(plans[0], report, asked.times, option="--report")
    known = any(each.time is not None for found in plans for each in found.setups)
    _show(plans, asked.model, output_format, asked.times if asked.shows_times or known else None)
    say_legend(values["legend"], is_table=output_format is RowFormat.TABLE)
    if values["chart"]:
        from memplan.report.pictures.scatter import front_picture

        print_charts([front_picture(each) for each in plans])
    if written:
        say(written)
    elif report is not None:
        _refuse_to_draw("--report")


DRAWING_IGNORES = frozenset({"chart", "legend", "format", "report"})
"""What is not looked at where a drawing is written instead."""
EMIT_IGNORES = DRAWING_IGNORES | {"limit"}
"""What is not looked at where a setup is written down instead."""
DRAWN = (".svg", ".html", ".htm")
"""Endings of files that memory against time is drawn in."""


def _draw(found: "Plan", file: str, question: "TimeQuestion | None", *, option: str) -> str:
    """Write memory against time as a page, or as a drawing, by what the file's name ends in; returns what is to be said.

    Raises ``InputError`` where no setup has a time.
    """
    from memplan import __version__
    from memplan.report.front import front_page
    from memplan.report.pictures.scatter import front_picture

    if not found.front:
        _refuse_to_draw(option)
    is_drawing = Path(file).suffix.lower() == ".svg"
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
