"""``memplan explain``."""

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.output.pictures import check_pictures
from memplan.cli.output.terminal import remark, say, say_legend, say_rows, write_bytes
from memplan.cli.taking import NO_VALUES, OPTIONAL_MODEL, Context, takes
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.questions import ESTIMATE
from memplan.options.rows.shared import ALLOW, FORMAT, LEGEND, MODEL, PICTURES, OutputFormat
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.estimator import Estimate

LESSON = (
    Option(
        flag="--operation", kind=str | None, panel=OUTPUT_PANEL,
        help_text="Explain one operation instead: what mul, softmax, rms_norm, attention, ... keeps for "
        "backward, in the sizes of a MODEL where one is named; all: every operator.",
    ),
    Option(
        flag="--shape", kind=str | None, metavar="SIZES", panel=OUTPUT_PANEL,
        help_text="With --operation: of tensors of these sizes, 512x1024x1024.",
    ),
    Option(
        flag="--dtype", kind=str | None, panel=OUTPUT_PANEL,
        help_text="With --operation: in this format, fp16, instead of bf16.",
    ),
)  # fmt: skip
"""What is asked of one operation."""
PARTS = (
    Option(
        flag="--component", kind=list[str] | None, metavar="NAMES", panel=OUTPUT_PANEL,
        help_text="The arithmetic of one component, or of several: activations,gradients.",
    ),
    Option(
        flag="--timeline", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Draw the bytes of a step over time.",
    ),
    Option(
        flag="--full", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Show every phase, every component and every tensor that a layer keeps.",
    ),
)  # fmt: skip
"""Parts of the arithmetic, for people."""
IN_PLACE = (
    Option(
        flag="--snapshot", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Write the predicted run as a memory snapshot, which pytorch.org/memory_viz opens: "
        "snapshot.pickle.",
    ),
    Option(
        flag="--against", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Compare with a run that torch.cuda.memory._dump_snapshot recorded: where did the "
        "memory go?",
    ),
    *PARTS,
    Option(
        flag="--time", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Draw a step as lanes over time instead: computing, communication, the host.",
    ),
)  # fmt: skip
"""What is shown in place of the arithmetic of all."""
ASKED = tuple(option for option in ESTIMATE if option is not ALLOW)
DEFAULT_GPU = "a100-80gb"


@takes(*ASKED, *LESSON, *PICTURES, *IN_PLACE, LEGEND, FORMAT, argument=OPTIONAL_MODEL)
def explain(ctx: Context, model: str | None = None, values: Values = NO_VALUES) -> None:
    """Show the arithmetic of an estimate: every component, the step's timeline, a report."""
    from memplan.cli.words.unused import refuse_unused, refuse_without

    if values["operation"] is not None:
        from memplan.cli.lesson import show_lesson

        refuse_unused(ctx, "--operation", LESSON_USES)
        show_lesson(ctx)
        return
    refuse_without(ctx, {"shape", "dtype"}, "--operation")
    _check_use(values)
    from memplan.cli.words.asked import asked_of
    from memplan.fast_dataclass import replace
    from memplan.options.estimating import answers

    asked = asked_of(ctx)
    if values["gpu"] is None and values["gpu_memory"] is None:
        asked = replace(asked, values={**asked.values, "gpu": [DEFAULT_GPU]})
    spec = asked.model(model) if model is not None else None
    if spec is None and values["setup"] is None:
        from memplan.errors import UsageError

        msg = "name a MODEL (memplan models lists the built-in ones), or give --operation"
        raise UsageError(msg)
    found = answers(asked, spec, remark=remark)
    if len(found) > 1 and values["report"] is None:
        from memplan.errors import UsageError

        msg = "--gpu: explain takes one, or --report report.html for several"
        raise UsageError(msg)
    _show(found, values)
    say_legend(values["legend"], is_table=values["format"] is OutputFormat.TABLE)


def _check_use(values: Values) -> None:
    """Raise ``UsageError`` for parts that do not go together."""
    from memplan.cli.words.unused import refuse

    check_pictures(values)
    given = [option.flag for option in IN_PLACE if values[option.parameter]]
    refuse(given[0] if given else "", given[1:])
    if values["format"] is not OutputFormat.TABLE and given != ["--against"]:
        refuse(given[0] if given else "", ["--format"] if given else [])


LESSON_USES = frozenset({
    "operation", "format", "model", "batch_size", "seq_len", "shape", "dtype",
    *(option.parameter for option in MODEL),
})  # fmt: skip
"""Parameters that a lesson makes use of: what it is about, and whose sizes it has."""


def _show(answers: "Sequence[Estimate]", values: Values) -> None:
    """Write what is asked for of the first, and the page of all."""
    found, output_format = answers[0], values["format"]
    written = ""
    if values["report"] is not None:
        written = _write(answers, values["report"])
    if values["time"]:
        from memplan.report.lanes import print_lanes
        from memplan.report.terminal.console import TerminalConsole

        print_lanes(TerminalConsole(), found)
    elif values["snapshot"] is not None:
        _write_snapshot(found, Path(values["snapshot"]))
    elif values["against"] is not None:
        _show_parting(found, Path(values["against"]), output_format)
    elif output_format is OutputFormat.TABLE:
        _print(found, values)
    else:
        _say_rows(found, output_format)
    if values["chart"]:
        from memplan.cli.output.pictures import estimate_pictures, print_charts

        print_charts(estimate_pictures([answers]))
    if written:
        say(written)


def _print(found: "Estimate", values: Values) -> None:
    """Write the arithmetic: on one screen, of some components, over time, or in full."""
    from memplan.report.explain import print_explanation, print_timeline
    from memplan.report.explained.explanation import explain_estimate
    from memplan.report.overview import component_kinds, print_components, print_overview
    from memplan.report.terminal.console import TerminalConsole
    from memplan.search.advice import hints_for

    kinds = component_kinds(values["component"] or [])
    console, hints = TerminalConsole(), hints_for(found.model, [[found]])
    if kinds:
        print_components(console, found, kinds, hints)
    elif values["timeline"]:
        print_timeline(console, found, hints)
    elif values["full"]:
        print_explanation(console, found, explain_estimate(found), hints)
    else:
        print_overview(console, found, explain_estimate(found), hints)


def _say_rows(found: "Estimate", output_format: OutputFormat) -> None:
    from memplan.report.explained.explanation import (
        EXPLAIN_SCHEMA_VERSION,
        explain_estimate,
        explanation_rows,
    )

    rows = explanation_rows(explain_estimate(found))
    if found.setup.pipeline is not None:
        from memplan.report.stages import stage_rows  # only where there are any

        rows += stage_rows(found)
    say_rows(rows, output_format, found.assumptions, schema_version=EXPLAIN_SCHEMA_VERSION)


def _write_snapshot(found: "Estimate", path: Path) -> None:
    """Write the predicted run in PyTorch's format, and say so.

    Raises ``InputError`` where the file cannot be written.
    """
    from memplan.estimator.named_run import named_run
    from memplan.memory.snapshots.snapshot import snapshot_of
    from memplan.sources.snapshot_file import snapshot_pickle

    run = named_run(found)
    data = snapshot_pickle(snapshot_of(run))
    write_bytes(path, data, option="--snapshot")
    steps = 1 + max(stretch.step for stretch in run.ledger.stretches)
    say(
        f"Wrote {path}: {len(data) // 1024} KiB, loading and {steps} steps; drop it on "
        "https://pytorch.org/memory_viz (nothing is uploaded)"
    )


def _show_parting(found: "Estimate", path: Path, output_format: OutputFormat) -> None:
    """Compare the prediction with a recorded run.

    Raises ``InputError`` for a file that is no snapshot.
    """
    from memplan.estimator.named_run import named_run
    from memplan.memory.snapshots.parting import Parting
    from memplan.memory.snapshots.recorded import read_recording
    from memplan.memory.snapshots.snapshot import snapshot_of
    from memplan.report.parting import PARTING_SCHEMA_VERSION, parting_rows, print_parting
    from memplan.sources.snapshot_file import read_snapshot

    recorded = read_recording(read_snapshot(path), source=str(path))
    predicted = read_recording(snapshot_of(named_run(found)), source="the prediction")
    parting = Parting(predicted=predicted, recorded=recorded)
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_parting(TerminalConsole(), found, parting, source=str(path))
        return
    say_rows(
        parting_rows(parting),
        output_format,
        found.assumptions,
        schema_version=PARTING_SCHEMA_VERSION,
    )


def _write(answers: "Sequence[Estimate]", file: str) -> str:
    """Write the page, or the step over time as a drawing; returns what is to be said of it."""
    from memplan.cli.output.pictures import estimate_report, write_report
    from memplan.report.pictures.steps import step_picture

    return write_report(
        file,
        page=lambda: estimate_report([answers]),
        drawings=lambda: [step_picture(each) for each in answers],
    )
