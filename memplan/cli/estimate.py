"""``memplan estimate``."""

import sys
from typing import TYPE_CHECKING

from memplan.cli.output.terminal import remark, say
from memplan.cli.taking import NO_VALUES, OPTIONAL_MODEL, Context, takes
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.questions import ESTIMATE
from memplan.options.rows.shared import CHECKS, EMIT, FORMAT, LEGEND, MODEL, PICTURES, OutputFormat
from memplan.options.run_times import MEASURED_OPTIONS, TIME_OPTIONS, time_question
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from memplan.cli.output.checking import Checks
    from memplan.estimator import Estimate
    from memplan.options.asked import Asked
    from memplan.options.estimating import EstimateQuestion

DEEPSPEED_PANEL = "DeepSpeed's own tables"
DEEPSPEED = (
    Option(
        flag="--deepspeed", kind=bool, default=False, metavar=None, panel=DEEPSPEED_PANEL,
        help_text="Print the ZeRO-2 and ZeRO-3 tables of DeepSpeed's estimators instead.",
    ),
    Option(
        flag="--deepspeed-formula", default="documented", panel=DEEPSPEED_PANEL,
        help_text="documented, or current (since June 2024).",
    ),
    Option(
        flag="--additional-buffer-factor", kind=float, default=1.5, metavar="FACTOR",
        panel=DEEPSPEED_PANEL, help_text="Factor on CPU memory.",
    ),
    Option(
        flag="--params", kind=str | None, metavar="N", panel=DEEPSPEED_PANEL,
        help_text="Parameters, without a MODEL: 2851e6.",
    ),
    Option(
        flag="--largest-layer", kind=str | None, metavar="N", panel=DEEPSPEED_PANEL,
        help_text="Of the largest layer: for ZeRO-3.",
    ),
)  # fmt: skip
"""Options of other people's tables."""
SHOWN = (
    LEGEND,
    Option(
        flag="--assumptions", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="List everything that was assumed, not only what fits into three lines.",
    ),
    Option(
        flag="--per-rank", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Print every distinct rank, the fullest first, instead of the worst one's verdict.",
    ),
    Option(
        flag="--lifetimes", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Print the peak by how long its bytes are held, and what lowers each.",
    ),
    Option(
        flag="--reserved", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Show what PyTorch's allocator reserves too (nvidia-smi's figure without the context).",
    ),
    FORMAT,
    *EMIT,
    *PICTURES,
)  # fmt: skip
"""How the answer is written."""


@takes(
    *ESTIMATE,
    *DEEPSPEED,
    *SHOWN,
    *TIME_OPTIONS,
    *MEASURED_OPTIONS,
    *CHECKS,
    argument=OPTIONAL_MODEL,
)
def estimate(ctx: Context, model: str | None = None, values: Values = NO_VALUES) -> None:
    """Estimate the memory of a training run, and say on which GPUs it fits."""
    from memplan.cli.words.asked import asked_of

    _check_use(ctx, values)
    checks = None
    if any(values[option.parameter] is not None for option in CHECKS):
        from memplan.cli.output.checking import read_checks

        checks = read_checks(values)
    asked = asked_of(ctx)
    spec = asked.model(model) if model is not None else None
    if values["deepspeed"] or values["params"] is not None:
        from memplan.cli.output.deepspeed_tables import show_deepspeed_tables

        show_deepspeed_tables(spec, values)
        return
    if spec is None and values["setup"] is None:
        from memplan.errors import UsageError

        msg = "name a MODEL (memplan models lists the built-in ones), or give --params"
        raise UsageError(msg)
    from memplan.options.estimating import estimate_question

    judged = estimate_question(asked, spec, alone=False, remark=remark)
    _show(asked, judged, _rows(asked, judged), checks)


def _check_use(ctx: Context, values: Values) -> None:
    """Raise ``UsageError`` for what was given and plays no part."""
    from memplan.cli.output.pictures import check_pictures
    from memplan.cli.words.unused import refuse_unused, refuse_without

    if values["params"] is not None:
        refuse_unused(ctx, "--params", TABLES_USE)
    elif values["deepspeed"]:
        refuse_unused(ctx, "--deepspeed", TABLES_USE | COUNTED_FROM_MODEL)
    else:
        refuse_without(ctx, TABLES_ONLY, "--deepspeed")
    if values["emit"] is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - EMIT_IGNORES)
    else:
        refuse_without(ctx, {"output"}, "--emit")
    check_pictures(values)
    time_question(values)


def _rows(asked: "Asked", judged: "EstimateQuestion") -> "list[list[Estimate]]":
    """The answers: a row for each setup, in it one for each card."""
    from memplan import cli
    from memplan.search.in_parallel import together
    from memplan.search.in_parallel.cores import usable_cores
    from memplan.search.in_parallel.side_by_side import SideBySide

    if cli.owns_process:
        together.num_cores = usable_cores()
    output_format = asked.values["format"]
    compared = SideBySide(
        model=judged.model,
        setups=judged.setups,
        gpus=judged.gpus,
        node_memory_bytes=judged.node_memory_bytes,
        notes=judged.notes,
        says_needs=_looks_everywhere(asked, judged)
        or output_format in (OutputFormat.JSON, OutputFormat.CSV),
    )
    rows = compared.rows()
    if any(each.lengths is not None for each in judged.setups):
        from memplan.search.lengths import with_batches

        rows = [[with_batches(each) for each in row] for row in rows]
    return rows


def _looks_everywhere(asked: "Asked", judged: "EstimateQuestion") -> bool:
    """Whether the largest micro-batch is looked for on every card, and not on the usual ones."""
    named = (asked.values["gpu"], asked.values["gpu_memory"])
    return named != (None, None) or len(judged.setups) == 1


def _show(
    asked: "Asked",
    judged: "EstimateQuestion",
    rows: "list[list[Estimate]]",
    checks: "Checks | None",
) -> None:
    """Write the answers and what is drawn of them, then judge them."""
    from memplan.cli.output.estimate_output import show, show_ranks

    values = asked.values
    emit, output_format = values["emit"], values["format"]
    written = None
    if values["report"] is not None:
        from memplan.cli.output.pictures import estimate_pictures, estimate_report, write_report

        written = write_report(
            values["report"],
            page=lambda: estimate_report(rows),
            drawings=lambda: estimate_pictures(rows),
        )
    if emit is not None:
        from memplan.cli.output.emitting import emit_only

        emit_only(rows, emit, values["output"], time_question(values))
    elif values["per_rank"]:
        show_ranks(rows, output_format)
    else:
        show(rows, values, everywhere=_looks_everywhere(asked, judged))
    if values["chart"]:
        from memplan.cli.output.pictures import estimate_pictures, print_charts

        print_charts(estimate_pictures(rows))
    if written is not None:
        say(written)
    if checks is not None:
        from memplan.cli.output.checking import check_rows

        for_people = emit is None and output_format is OutputFormat.TABLE
        check_rows(rows, checks, judged.model, sys.stdout if for_people else sys.stderr)


TABLES_ONLY = frozenset({"deepspeed_formula", "additional_buffer_factor", "largest_layer"})
"""Options of DeepSpeed's tables, by the command's parameter."""
TABLES_USE = TABLES_ONLY | {"deepspeed", "params", "gpus", "nodes", "format"}
"""What DeepSpeed's tables make use of, beside a model."""
COUNTED_FROM_MODEL = frozenset({"model", *(option.parameter for option in MODEL)})
"""What they make use of, beside those, where a model is counted."""
EMIT_IGNORES = frozenset(
    {"allow", "assumptions", "chart", "legend", "lifetimes", "format", "report", "reserved"}
)
"""What is not looked at where a setup is written down instead."""
