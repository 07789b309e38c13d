"""``memplan plan``."""

from typing import TYPE_CHECKING, Never

from memplan.cli.output.pictures import check_pictures, print_charts, write_report
from memplan.cli.output.terminal import remark, say, say_legend
from memplan.cli.taking import MODEL_ARGUMENT, NO_VALUES, Context, takes
from memplan.errors import UsageError
from memplan.fast_dataclass import replace
from memplan.options.questions import PLAN
from memplan.options.rows.shared import EMIT, LEGEND, PICTURES, ROW_FORMAT, RowFormat
from memplan.options.run_times import TIME_OPTIONS
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.model.spec import ModelSpec
    from memplan.options.planning import PlanQuestion
    from memplan.search.planning.goal import Plan, PlannedSetup
    from memplan.search.planning.pools import PoolPlan


@takes(*PLAN, LEGEND, ROW_FORMAT, *PICTURES, *EMIT, *TIME_OPTIONS, argument=MODEL_ARGUMENT)
def plan(ctx: Context, model: str, values: Values = NO_VALUES) -> None:
    """Search for the setups that fit, best first, and what would make the rest fit."""
    _check_use(ctx, values)
    from memplan.cli.output.progress import waiting
    from memplan.cli.words.asked import asked_of
    from memplan.options.planning import plan_question

    emit = values["emit"]
    asked = plan_question(asked_of(ctx), remark=remark)
    if max(len(asked.gpus), len(asked.pools)) > 1 and values["report"] is not None:
        msg = "--report: a page is of one GPU: name one"
        raise UsageError(msg)
    with waiting("looking through engines, stages, checkpointing and batches"):
        pooled = _pooled(asked) if asked.pools else []
        plans = [each.plan for each in pooled if each.plan is not None] or _plans(asked)
    emit = emit or _its_scheduler(plans[0], values)
    if emit is not None:
        _emit(plans[: 1 if pooled else None], emit, values["output"], asked.times)
    else:
        if pooled and values["format"] is RowFormat.TABLE:
            from memplan.report.pools import print_pools
            from memplan.report.terminal.console import TerminalConsole

            print_pools(TerminalConsole(), pooled)
            plans = plans[:1]
        _answer(plans, asked, values)
    if plans[-1].is_interrupted:
        remark("interrupted: of what was found by then")
        raise KeyboardInterrupt


def _emit(
    plans: "list[Plan]", emit: str, output: str | None, question: "TimeQuestion | None"
) -> None:
    """Write the best setup down, for the pool that it goes to where there are pools."""
    from memplan.cli.output.emitting import emit_answer

    best, pool = _chosen(plans, emit).estimate, plans[0].pool
    emit_answer(best, emit, output, question, queue="" if pool is None else pool.queue)
    if pool is not None:
        remark(f"for the pool {pool.name}: {best.setup.num_gpus} of its {pool.gpu.short_name} GPUs")


def _its_scheduler(found: "Plan", values: Values) -> str | None:
    """What --output alone means: the file of the pool's own scheduler. Raises ``UsageError`` where none is known."""
    if values["output"] is None:
        return None
    if found.pool is None or not found.pool.scheduler:
        msg = "--output: the pool names no scheduler: say which file is wanted with --emit"
        raise UsageError(msg)
    return found.pool.scheduler


def _pooled(asked: "PlanQuestion") -> "list[PoolPlan]":
    """A plan for each pool, the best first."""
    from memplan.search.planning.pools import pool_plans

    return pool_plans(
        asked.model, asked.goal, asked.pools, times=asked.times, is_open=not asked.asks_count,
        stoppable=True,
    )  # fmt: skip


def _plans(asked: "PlanQuestion") -> "list[Plan]":
    """A plan for each card, up to one that is interrupted."""
    from memplan.search.planning.planner import plan as make_plan

    found: list[Plan] = []
    for each in asked.gpus:
        try:
            found.append(
                make_plan(asked.model, asked.goal, each, times=asked.times, stoppable=True)
            )
        except KeyboardInterrupt:
            if not found:
                raise
            found[-1] = replace(found[-1], is_interrupted=True)
        if found[-1].is_interrupted:
            break
    return found


def _check_use(ctx: Context, values: Values) -> None:
    """Raise ``UsageError`` for what was given and plays no part."""
    from memplan.cli.words.unused import refuse_unused, refuse_without

    if values["emit"] is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - EMIT_IGNORES)
    elif values["pools"] is None:
        refuse_without(ctx, {"output"}, "--emit")
    check_pictures(values)


def _answer(plans: "list[Plan]", asked: "PlanQuestion", values: Values) -> None:
    """Write the plans, and what is drawn of them."""
    report, output_format = values["report"], values["format"]
    written = ""
    if report is not None and plans[0].front:
        written = _draw(plans[0], report, asked.times)
    known = any(each.time is not None for found in plans for each in found.setups)
    _show(plans, asked.model, output_format, asked.times if asked.shows_times or known else None)
    say_legend(values["legend"], is_table=output_format is RowFormat.TABLE)
    if values["chart"]:
        from memplan.report.pictures.scatter import front_picture

        print_charts([front_picture(each) for each in plans])
    if written:
        say(written)
    elif report is not None:
        _refuse_to_draw()


EMIT_IGNORES = frozenset({"chart", "legend", "format", "limit", "report"})
"""What is not looked at where a setup is written down instead."""


def _draw(found: "Plan", file: str, question: "TimeQuestion | None") -> str:
    """Write memory against time; returns what is to be said of it.

    Raises ``InputError`` where no setup has a time.
    """
    from memplan import __version__
    from memplan.report.front import front_page
    from memplan.report.pictures.scatter import front_picture

    if not found.front:
        _refuse_to_draw()
    return write_report(
        file,
        page=lambda: front_page(found, version=__version__, question=question),
        drawings=lambda: [front_picture(found)],
    )


def _refuse_to_draw() -> Never:
    from memplan.errors import InputError

    msg = "--report: nothing fits whose time is known, so there is nothing to draw"
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
        from memplan.report.plans.printed import print_plans
        from memplan.report.terminal.console import TerminalConsole

        print_plans(TerminalConsole(), plans, question=question)
        return
    from memplan.cli.output.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.plans.rows import markdown_columns, plan_rows
    from memplan.report.rows.stream import csv_lines, json_document, json_lines, markdown_lines

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
