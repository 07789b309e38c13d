"""``memplan explain``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    FamilyOption,
    FormatOption,
    GpuMemoryOption,
    GpuOption,
    LegendOption,
    NumGpusOption,
    NumLabelsOption,
    NumNodesOption,
    OptionalModelArgument,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_settings
from memplan.cli.terminal import remark, say, say_legend, write_bytes, write_file
from memplan.cli.training_options import (
    EngineOption,
    EngineOptionOption,
    OffloadOption,
    OffloadParamOption,
    PrecisionOption,
    ZeroOption,
)
from memplan.options.engine_options import parse_engine_options
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.settings import setting_fields
from memplan.options.table import Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.dtypes import DType
    from memplan.estimator import Estimate
    from memplan.report.lessons import Sizes
    from memplan.report.rows import Row


@takes_settings()
def explain(
    ctx: typer.Context,
    model: OptionalModelArgument = None,
    num_gpus: NumGpusOption = 1,
    num_nodes: NumNodesOption = None,
    gpu: GpuOption = None,
    gpu_memory: GpuMemoryOption = None,
    engine: EngineOption = None,
    zero: ZeroOption = None,
    offload: OffloadOption = None,
    offload_param: OffloadParamOption = None,
    settings: Values = NO_SETTINGS,
    engine_option: EngineOptionOption = None,
    precision: PrecisionOption = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    operation: Annotated[
        str | None,
        typer.Option(
            "--operation",
            metavar="NAME",
            help="Explain one operation instead: what mul, softmax, rms_norm, attention, ... "
            "keeps for backward, in the sizes of a MODEL where one is named; all: every operator.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SIZES",
            help="With --operation: of tensors of these sizes, 512x1024x1024.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="With --operation: in this format, fp16, instead of bf16.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write a self-contained report.html, or the timeline alone as timeline.svg.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot",
            metavar="FILE",
            help="Write the predicted run as a memory snapshot, which pytorch.org/memory_viz opens: "
            "snapshot.pickle.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE",
            help="Compare with a run that torch.cuda.memory._dump_snapshot recorded: where did the "
            "memory go?",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    component: Annotated[
        list[str] | None,
        typer.Option(
            "--component",
            metavar="NAMES",
            help="The arithmetic of one component, or of several: activations,gradients.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Draw the bytes of a step over time.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Show every phase, every component and every tensor that a layer keeps.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    time: Annotated[
        bool,
        typer.Option(
            "--time",
            help="Draw a step as lanes over time instead: computing, communication, the host.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    legend: LegendOption = False,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Show the arithmetic of an estimate: every component, the step's timeline, a report."""
    from memplan.cli.unused import refuse, refuse_unused, refuse_without

    if operation is None:
        refuse_without(ctx, {"shape", "dtype"}, "--operation")
    else:
        refuse_unused(ctx, "--operation", LESSON_USES)
        _show_lesson(ctx, operation, output_format)
        return
    if output is not None and output_format is not OutputFormat.TABLE:
        refuse("--output", ["--format"])
    wanted = {
        "--output": output, "--snapshot": snapshot, "--against": against, "--time": time or None,
        "--component": component, "--timeline": timeline or None, "--full": full or None,
    }  # fmt: skip
    named = [name for name, value in wanted.items() if value is not None]
    refuse(named[0] if named else "", named[1:])
    if snapshot is not None and output_format is not OutputFormat.TABLE:
        refuse("--snapshot", ["--format"])
    for name in ("--time", "--component", "--timeline", "--full"):
        if wanted[name] and output_format is not OutputFormat.TABLE:
            refuse(name, ["--format"])
    from memplan.errors import UsageError
    from memplan.estimator import estimate as estimate_memory
    from memplan.options.hardware import chosen_gpus, gpu_names
    from memplan.options.single import with_engine
    from memplan.sources.models import load_model
    from memplan.training.setup import TrainingSetup

    if model is None:
        msg = "name a MODEL (memplan models lists the built-in ones), or give --operation"
        raise UsageError(msg)
    spec = load_model(
        model,
        task,
        family=family,
        allow_guess=allow_guess,
        allow_unknown_keys=allow_unknown_keys,
        num_labels=num_labels,
        revision=revision,
        token=token,
    )
    base = TrainingSetup(
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        **setting_fields(settings),  # type: ignore[arg-type]
        engine_options=parse_engine_options(engine_option),
    )
    engine_words = {
        "precision": precision, "engine": engine, "zero": zero, "offload": offload,
        "offload_param": offload_param,
    }  # fmt: skip
    setup = with_engine(base, **engine_words)
    names = gpu_names(gpu) or ([] if gpu_memory else ["a100-80gb"])
    if len(names) + (gpu_memory is not None) > 1 and output is None:
        msg = "--gpu: explain takes one, or --output report.html for several"
        raise UsageError(msg)
    if time:
        from memplan.report.console import TerminalConsole
        from memplan.report.lanes import print_lanes

        (only,) = chosen_gpus(names, gpu_memory, remark=remark)
        print_lanes(TerminalConsole(), estimate_memory(spec, setup, only))
        return
    found = [
        estimate_memory(spec, setup, each) for each in chosen_gpus(names, gpu_memory, remark=remark)
    ]
    if output is not None:
        _write(found, output)
        return
    if snapshot is not None:
        _write_snapshot(found[0], snapshot)
        return
    if against is not None:
        _show_parting(found[0], against, output_format)
        return
    _show(found[0], output_format, component=component, timeline=timeline, full=full)
    say_legend(legend, is_table=output_format is OutputFormat.TABLE)


LESSON_USES = frozenset({
    "operation", "output_format", "model", "batch_size", "seq_len", "task", "family", "allow_guess",
    "allow_unknown_keys", "num_labels", "revision", "token", "shape", "dtype",
})  # fmt: skip
"""Parameters that a lesson makes use of: what it is about, and whose sizes it has."""


def _show_lesson(ctx: typer.Context, name: str, output_format: OutputFormat) -> None:
    from memplan.cli.unused import given_options, refuse
    from memplan.report.explain_operation import (
        lesson_rows,
        operator_rows,
        print_lesson,
        print_operators,
    )
    from memplan.report.lesson_names import find_lesson

    sizes = _lesson_sizes(ctx)
    if name == EVERY_OPERATOR:
        if output_format is OutputFormat.TABLE:
            from memplan.report.console import TerminalConsole

            print_operators(TerminalConsole(), sizes)
            return
        from memplan.report.explanation import EXPLAIN_SCHEMA_VERSION

        rows = operator_rows(sizes)
        _echo_rows(rows, output_format, (), schema_version=EXPLAIN_SCHEMA_VERSION)
        return
    lesson = find_lesson(name)
    if lesson.fixed_sizes and not sizes.of_shape:
        given = given_options(ctx)
        names = ("model", "batch_size", "seq_len", "dtype")
        idle = [text for key, text in given.items() if key in names]
        refuse(f"--operation {lesson.name}, which is about {lesson.fixed_sizes},", idle)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_lesson(TerminalConsole(), lesson, sizes)
        return
    from memplan.report.explanation import EXPLAIN_SCHEMA_VERSION

    rows = lesson_rows(lesson, sizes)
    _echo_rows(rows, output_format, (), schema_version=EXPLAIN_SCHEMA_VERSION)


EVERY_OPERATOR = "all"


def _read_shape(text: str) -> tuple[int, ...]:
    """``512x1024x1024``.

    Raises ``UsageError`` for anything else.
    """
    from memplan.errors import UsageError

    parts = text.lower().replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        msg = f"--shape: {text!r} are no sizes of a tensor: write 512x1024x1024"
        raise UsageError(msg)
    return tuple(map(int, parts))


def _read_dtype(text: str) -> "DType":
    """A floating-point format, by its name here or torch's.

    Raises ``UsageError`` for any other.
    """
    from memplan.dtypes import DType
    from memplan.errors import UsageError, did_you_mean

    known = {each.label: each for each in DType if each.is_floating}
    known |= {"float32": DType.FP32, "float16": DType.FP16, "bfloat16": DType.BF16}
    name = text.lower().removeprefix("torch.")
    if name not in known:
        msg = (
            f"--dtype: {text!r} is not one of {', '.join(known)}.{did_you_mean(name, tuple(known))}"
        )
        raise UsageError(msg)
    return known[name]


def _lesson_sizes(ctx: typer.Context) -> "Sizes":
    """The usual sizes, or those of the model or tensor named; as many tokens as are asked for."""
    from dataclasses import replace

    from memplan.cli.unused import given_options, refuse
    from memplan.report.lessons import USUAL, Sizes
    from memplan.report.shape import formula_shape
    from memplan.sources.models import load_model

    asked = ctx.params
    dtype = USUAL.dtype if asked["dtype"] is None else _read_dtype(asked["dtype"])
    if asked["shape"] is not None:
        given = given_options(ctx)
        idle = [text for key, text in given.items() if key in ("model", "batch_size", "seq_len")]
        refuse("--shape", idle)
        return Sizes.of(_read_shape(asked["shape"]), dtype)
    sizes = replace(
        USUAL, batch=asked["batch_size"] or 1, tokens=asked["seq_len"] or USUAL.tokens, dtype=dtype
    )
    if asked["model"] is None:
        return sizes
    names = ("family", "allow_guess", "allow_unknown_keys", "num_labels", "revision", "token")
    spec = load_model(asked["model"], asked["task"], **{name: asked[name] for name in names})
    shape = formula_shape(spec)
    return replace(
        sizes,
        hidden=shape.hidden_size,
        width=shape.intermediate_size or shape.expert_size,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
    )


def _show(
    found: "Estimate",
    output_format: OutputFormat,
    *,
    component: list[str] | None,
    timeline: bool,
    full: bool,
) -> None:
    """Write the arithmetic: on one screen, of some components, over time, or in full."""
    from memplan.report.explain import print_explanation, print_timeline
    from memplan.report.explanation import (
        EXPLAIN_SCHEMA_VERSION,
        explain_estimate,
        explanation_rows,
    )

    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole
        from memplan.report.overview import component_kinds, print_components, print_overview
        from memplan.search.advice import hints_for

        kinds = component_kinds(component or [])
        console, hints = TerminalConsole(), hints_for(found.model, [[found]])
        if kinds:
            print_components(console, found, kinds, hints)
        elif timeline:
            print_timeline(console, found, hints)
        elif full:
            print_explanation(console, found, explain_estimate(found), hints)
        else:
            print_overview(console, found, explain_estimate(found), hints)
        return
    rows = explanation_rows(explain_estimate(found))
    if found.setup.pipeline is not None:
        from memplan.report.stages import stage_rows  # only where there are any

        rows += stage_rows(found)
    _echo_rows(rows, output_format, found.assumptions, schema_version=EXPLAIN_SCHEMA_VERSION)


def _write_snapshot(found: "Estimate", path: Path) -> None:
    """Write the predicted run in PyTorch's format, and say so.

    Raises ``InputError`` where the file cannot be written.
    """
    from memplan.estimator.named_run import named_run
    from memplan.memory.snapshot import snapshot_of
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
    from memplan.memory.parting import Parting
    from memplan.memory.recorded import read_recording
    from memplan.memory.snapshot import snapshot_of
    from memplan.report.parting import PARTING_SCHEMA_VERSION, parting_rows, print_parting
    from memplan.sources.snapshot_file import read_snapshot

    recorded = read_recording(read_snapshot(path), source=str(path))
    predicted = read_recording(snapshot_of(named_run(found)), source="the prediction")
    parting = Parting(predicted=predicted, recorded=recorded)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_parting(TerminalConsole(), found, parting, source=str(path))
        return
    _echo_rows(
        parting_rows(parting),
        output_format,
        found.assumptions,
        schema_version=PARTING_SCHEMA_VERSION,
    )


def _echo_rows(
    rows: "Sequence[Row]",
    output_format: OutputFormat,
    assumptions: "Sequence[str]",
    *,
    schema_version: int,
) -> None:
    from memplan.report.rows import rows_csv, rows_json, rows_markdown

    if output_format is OutputFormat.JSON:
        text = rows_json(rows, schema_version=schema_version, assumptions=assumptions)
    else:
        text = rows_csv(rows) if output_format is OutputFormat.CSV else rows_markdown(rows)
    say(text)


def _write(found: "Sequence[Estimate]", output: Path) -> None:
    """Write the report or the drawing, and say so.

    Raises ``UsageError`` for another ending, and ``InputError`` where the file cannot be written.
    """
    from memplan.errors import UsageError

    ending = output.suffix.lower()
    if ending in (".html", ".htm"):
        from memplan import __version__
        from memplan.report.html import html_report

        text = html_report(found, version=__version__)
    elif ending == ".svg":
        if len(found) > 1:
            msg = "--output: a drawing is of one GPU: name one, or write a report.html"
            raise UsageError(msg)
        from memplan.report.pictures.steps import step_picture

        text = step_picture(found[0]).svg
    else:
        msg = f"--output: {output.name!r} must end in .html (a report) or .svg (the timeline)"
        raise UsageError(msg)
    write_file(output, text, option="--output")
    say(f"Wrote {output}: {len(text.encode()) // 1024} KiB")
