"""``memplan plan``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    CpuMemoryOption,
    FamilyOption,
    GpuMemoryOption,
    ModelArgument,
    NumLabelsOption,
    RevisionOption,
    TaskOption,
    TokenOption,
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
from memplan.cli.terminal import remark, say, write_file
from memplan.cli.training_options import (
    PresetOption,
    SetupFileOption,
    TrainingArgumentsOption,
)
from memplan.errors import UsageError, did_you_mean
from memplan.options.axes import parse_share, read_concessions
from memplan.options.panels import OUTPUT_PANEL
from memplan.options.run_times import time_question
from memplan.options.settings import read_tokens, setting_fields
from memplan.options.setup_files import base_setup
from memplan.options.table import Values

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from memplan.estimator.run_cost import TimeQuestion
    from memplan.model.spec import ModelSpec
    from memplan.search.goal import Objective, Plan, PlannedSetup
    from memplan.training.choices import Checkpointing, ZeroStage
    from memplan.training.precision import Engine, Precision
    from memplan.training.setup import TrainingSetup

PLAN_PANEL = "Goal"
DEGREES_PANEL = (
    "How models are split [default: what is usual, where that is faster or all that fits]"
)


def degrees_option(name: str, also: str, what: str) -> Any:
    """An option that takes degrees of one kind."""
    return typer.Option(
        name,
        also,
        metavar="LIST",
        help=f"{what}: 1,2,4 or 1..8.",
        rich_help_panel=DEGREES_PANEL,
        show_default=False,
    )


@takes_times
@takes_setting_axes(
    without={
        "micro_batch_size", "gradient_accumulation_steps", "seq_len", "target_seq_len", "checkpointing",
        "tensor_parallel", "pipeline_parallel", "pipeline_schedule", "virtual_stages",
        "context_parallel", "context_parallel_kind", "sequence_parallel",
        "expert_parallel", "expert_imbalance",
    }
)  # fmt: skip
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
    output_format: RowFormatOption = RowFormat.TABLE,
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
    from memplan.cli.unused import given_options, refuse_unused, refuse_without

    if emit is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - {"output_format", "limit"})
    elif not (output or "").lower().endswith(DRAWN):
        refuse_without(ctx, {"output"}, "--emit (front.svg and front.html go without)")
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.options.hardware import chosen_gpus, node_memory
    from memplan.search.goal import Goal, Objective
    from memplan.search.planner import plan as make_plan
    from memplan.sources.models import load_model

    changes = {"seq_len": seq_len, **setting_fields(settings)}
    base = _laid_over(base_setup(setup, training_args, preset, remark=remark), changes)
    wanted = _objective(ctx, objective, maximize)
    question = time_question(times)
    asked = question is not None or wanted is Objective.COST
    if question is None and wanted in (Objective.SPEED, Objective.COST, Objective.GPUS):
        question = TimeQuestion()
    if wanted in (Objective.SEQ_LEN, Objective.LAYERS):
        if "batch_size" in given_options(ctx):
            base = replace(base, micro_batch_size=batch_size)
        _name_replaced(base, kept=("micro_batch_size", "gradient_accumulation_steps"))
    else:
        refuse_without(ctx, {"batch_size"}, "--maximize seq-len or layers")
        _name_replaced(base)
    goal = Goal(
        num_gpus=_counts(num_gpus, base),
        global_batch_size=global_batch_size,
        headroom=parse_share(headroom, option="--headroom"),
        objective=wanted,
        base=base,
        engines=_engines(engine) or tuple(filter(None, [base.engine])),
        zero_stages=_stages(zero),
        precisions=_precisions(precision) or tuple(filter(None, [base.precision])),
        checkpointing=_policies(checkpointing),
        tensor_parallel=_degrees(tensor_parallel, "--tensor-parallel"),
        pipeline_parallel=_degrees(pipeline_parallel, "--pipeline-parallel"),
        virtual_stages=_degrees(virtual_stages, "--virtual-stages"),
        context_parallel=_degrees(context_parallel, "--context-parallel"),
        expert_parallel=_degrees(expert_parallel, "--expert-parallel"),
        allow=read_concessions(allow),
        limit=limit,
        node_memory_bytes=node_memory(cpu_memory) if cpu_memory is not None else None,
    )
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
    names = gpu or ([] if gpu_memory is not None else [DEFAULT_GPU])
    plans = [
        make_plan(spec, goal, each, times=question)
        for each in chosen_gpus(names, gpu_memory, remark=remark)
    ]
    if emit is not None:
        from memplan.cli.emitting import emit_setup

        emit_setup(_chosen(plans).setup, spec, emit, output)
        return
    if output is not None:
        _draw(plans, Path(output), question)
        return
    known = any(each.time is not None for found in plans for each in found.setups)
    _show(plans, spec, output_format, question if asked or known else None)


DRAWN = (".svg", ".html", ".htm")
"""Endings of files that memory against time is drawn in."""


def _draw(plans: "Sequence[Plan]", output: Path, question: "TimeQuestion | None") -> None:
    """Write the drawing of memory against time, and say so.

    Raises ``UsageError`` for several kinds of GPUs, and ``InputError`` where no setup has a time.
    """
    from memplan import __version__
    from memplan.errors import InputError
    from memplan.report.front import front_page, front_svg

    if len(plans) > 1:
        msg = "--output: a drawing is of one GPU: name one"
        raise UsageError(msg)
    if not plans[0].front:
        msg = "--output: nothing fits whose time is known, so there is nothing to draw"
        raise InputError(msg)
    is_drawing = output.suffix.lower() == ".svg"
    text = (
        front_svg(plans[0])
        if is_drawing
        else front_page(plans[0], version=__version__, question=question)
    )
    write_file(output, text, option="--output")
    say(f"Wrote {output}: {len(text.encode()) // 1024} KiB")


DEFAULT_GPU = "h100-80gb"
"""What a plan is for when no GPU is named."""
DEFAULT_NUM_GPUS = 8


CHOSEN_BY_PLAN = (
    "micro_batch_size", "gradient_accumulation_steps", "checkpointing", "num_nodes", "zero_stage",
    "fsdp_strategy", "offload_optimizer", "offload_param",
)  # fmt: skip
"""What a file may fix, and a plan searches for all the same."""


def _name_replaced(base: "TrainingSetup", *, kept: "Collection[str]" = ()) -> None:
    """Say on stderr what of a file's setup the plan does not keep."""
    from memplan.training.setup import TrainingSetup

    usual = TrainingSetup()
    replaced = [name for name in CHOSEN_BY_PLAN if getattr(base, name) != getattr(usual, name)]
    replaced = [name for name in replaced if name not in kept]
    if replaced:
        from memplan.cli.terminal import remark

        remark(f"the plan itself chooses {', '.join(replaced)}")


def _laid_over(base: "TrainingSetup", changes: dict[str, object]) -> "TrainingSetup":
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(base, **given) if given else base  # type: ignore[arg-type]


def _counts(text: str | None, base: "TrainingSetup") -> tuple[int, ...]:
    from memplan.search.ranges import parse_range

    if text is not None:
        return tuple(parse_range(text, option="--gpus", minimum=1))
    return (base.num_gpus if base.num_gpus > 1 else DEFAULT_NUM_GPUS,)


def _objective(ctx: typer.Context, objective: str, maximize: str | None) -> "Objective":
    """What comes first. Raises ``UsageError`` where that is said twice."""
    from memplan.cli.unused import given_options, refuse
    from memplan.search.goal import Objective
    from memplan.training.coercion import coerce_enum

    if maximize is None:
        return coerce_enum("objective", objective, Objective)
    given = given_options(ctx)
    found = {each.value: each for each in (Objective.BATCH, Objective.SEQ_LEN, Objective.LAYERS)}
    if maximize not in found:
        known = tuple(found)
        hint = did_you_mean(maximize, known)
        msg = f"--maximize: {maximize!r} is not one of {', '.join(known)}.{hint}"
        raise UsageError(msg)
    refuse("--maximize", [given[name] for name in ("objective",) if name in given])
    if maximize == Objective.SEQ_LEN.value:
        refuse("--maximize seq-len", [given[name] for name in ("seq_len",) if name in given])
    return found[maximize]


def _stages(text: str | None) -> "tuple[ZeroStage, ...]":
    from memplan.search.ranges import parse_range
    from memplan.training.choices import ZeroStage
    from memplan.training.coercion import coerce_enum

    if text is None:
        return ()
    return tuple(
        coerce_enum("zero_stage", stage, ZeroStage) for stage in parse_range(text, option="--zero")
    )


def _degrees(text: str | None, option: str) -> tuple[int, ...]:
    from memplan.search.ranges import parse_range

    return () if text is None else tuple(parse_range(text, option=option, minimum=1))


def _engines(text: str | None) -> "tuple[Engine, ...]":
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine

    return tuple(coerce_enum("engine", each, Engine) for each in _parts(text))


def _precisions(text: str | None) -> "tuple[Precision, ...]":
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Precision

    return tuple(coerce_enum("precision", each, Precision) for each in _parts(text))


def _policies(text: str | None) -> "tuple[Checkpointing, ...]":
    from memplan.training.setup import TrainingSetup

    return tuple(
        TrainingSetup(checkpointing=each).checkpointing  # type: ignore[arg-type]
        for each in _parts(text)
    )


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _chosen(plans: "list[Plan]") -> "PlannedSetup":
    """The best setup, to be written down."""
    from memplan.errors import SetupError, UsageError

    if len(plans) > 1:
        msg = "--emit: writes one setup: name one GPU with --gpu"
        raise UsageError(msg)
    if not plans[0].setups:
        msg = "--emit: nothing fits, so there is no setup to write"
        raise SetupError(msg)
    return plans[0].setups[0]


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
