"""``memplan estimate``."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.option_table import Values
from memplan.cli.options import (
    OUTPUT_PANEL,
    AllowGuessOption,
    AllowUnknownKeysOption,
    CpuMemoryOption,
    FamilyOption,
    FormatOption,
    GpuMemoryOption,
    GpuOption,
    NumGpusOption,
    NumLabelsOption,
    NumNodesOption,
    OptionalModelArgument,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.setting_options import (
    FIELD_PARAMETERS,
    NO_SETTINGS,
    group_fields,
    setting_fields,
    takes_settings,
)
from memplan.cli.sweep_options import (
    BaselineOption,
    CheckOption,
    EmitOption,
    ExactOption,
    FailOnOption,
    GlobalBatchOption,
    OutputOption,
    ToleranceOption,
    UnmatchedOption,
)
from memplan.cli.terminal import say
from memplan.cli.training_options import (
    AccelerateConfigOption,
    DeepSpeedConfigOption,
    EngineOption,
    EngineOptionOption,
    FsdpStrategyOption,
    OffloadOption,
    OffloadParamOption,
    PrecisionOption,
    PresetOption,
    SetupFileOption,
    TrainingArgumentsOption,
    ZeroOption,
    parse_engine_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.cli.setup_files import BaseSetup
    from memplan.estimator import Estimate
    from memplan.training.setup import Offload, TrainingSetup

DEEPSPEED_PANEL = "DeepSpeed's own tables"


def _table_option(name: str, help_text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=DEEPSPEED_PANEL)


@takes_settings()
def estimate(
    ctx: typer.Context,
    model: OptionalModelArgument = None,
    num_gpus: NumGpusOption = 1,
    num_nodes: NumNodesOption = None,
    gpu: GpuOption = None,
    gpu_memory: GpuMemoryOption = None,
    cpu_memory: CpuMemoryOption = None,
    engine: EngineOption = None,
    zero: ZeroOption = None,
    offload: OffloadOption = None,
    offload_param: OffloadParamOption = None,
    fsdp_strategy: FsdpStrategyOption = None,
    settings: Values = NO_SETTINGS,
    engine_option: EngineOptionOption = None,
    global_batch_size: GlobalBatchOption = None,
    precision: PrecisionOption = None,
    setup_file: SetupFileOption = None,
    preset: PresetOption = None,
    training_args: TrainingArgumentsOption = None,
    deepspeed_config: DeepSpeedConfigOption = None,
    accelerate_config: AccelerateConfigOption = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    deepspeed: Annotated[
        bool,
        typer.Option(
            "--deepspeed",
            help="Print the ZeRO-2 and ZeRO-3 tables of DeepSpeed's estimators instead.",
            rich_help_panel=DEEPSPEED_PANEL,
        ),
    ] = False,
    deepspeed_formula: Annotated[
        str,
        _table_option("--deepspeed-formula", "documented, or current (since June 2024).", "NAME"),
    ] = "documented",
    additional_buffer_factor: Annotated[
        float, _table_option("--additional-buffer-factor", "Factor on CPU memory.", "FACTOR")
    ] = 1.5,
    params: Annotated[
        str | None, _table_option("--params", "Parameters, without a MODEL: 2851e6.", "N")
    ] = None,
    largest_layer: Annotated[
        str | None, _table_option("--largest-layer", "Of the largest layer: for ZeRO-3.", "N")
    ] = None,
    legend: Annotated[
        bool,
        typer.Option(
            "--legend",
            help="Explain every word of the table below it.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    per_rank: Annotated[
        bool,
        typer.Option(
            "--per-rank",
            help="Print every distinct rank, the fullest first, instead of the worst one's verdict.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    exact: ExactOption = False,
    reserved: Annotated[
        bool,
        typer.Option(
            "--reserved",
            help="Show what PyTorch's allocator reserves too (nvidia-smi's figure without the "
            "context); replays every run.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    output_format: FormatOption = OutputFormat.TABLE,
    emit: EmitOption = None,
    output: OutputOption = None,
    check: CheckOption = None,
    fail_on: FailOnOption = None,
    baseline: BaselineOption = None,
    tolerance: ToleranceOption = None,
    unmatched: UnmatchedOption = None,
) -> None:
    """Estimate the memory of a training run, and say on which GPUs it fits."""
    from memplan.cli.hardware import chosen_gpus, node_memory
    from memplan.cli.setup_files import model_of, read_base
    from memplan.cli.unused import refuse_unused, refuse_without
    from memplan.sources.models import load_model

    if deepspeed or params is not None:
        if params is not None:
            refuse_unused(ctx, "--params", TABLES_USE)
        else:
            refuse_unused(ctx, "--deepspeed", TABLES_USE | COUNTED_FROM_MODEL)
    else:
        refuse_without(ctx, TABLES_ONLY, "--deepspeed")
    if emit is not None:
        refuse_unused(ctx, "--emit", ctx.params.keys() - EMIT_IGNORES)
    else:
        refuse_without(ctx, {"output"}, "--emit")
    checks = None
    if any(each is not None for each in (check, fail_on, baseline, tolerance, unmatched)):
        from memplan.cli.checking import read_checks

        checks = read_checks(check, fail_on, baseline, tolerance, unmatched)
    spec = None
    if model is not None:
        spec = load_model(
            model,
            task,
            family=family,
            num_labels=num_labels,
            revision=revision,
            token=token,
            allow_guess=allow_guess,
            allow_unknown_keys=allow_unknown_keys,
        )
    if deepspeed or params is not None:
        from memplan.cli.deepspeed_tables import show_deepspeed_tables

        show_deepspeed_tables(
            spec,
            params=params,
            largest_layer=largest_layer,
            num_gpus=num_gpus,
            num_nodes=num_nodes,
            formula=deepspeed_formula,
            additional_buffer_factor=additional_buffer_factor,
            output_format=output_format,
        )
        return
    if spec is None and setup_file is None:
        from memplan.errors import UsageError

        msg = "name a MODEL (memplan models lists the built-in ones), or give --params"
        raise UsageError(msg)
    fields: dict[str, object] = {
        "num_gpus": num_gpus,
        "num_nodes": num_nodes,
        **setting_fields(settings),
        "engine_options": parse_engine_options(engine_option),
    }
    given = given_fields(ctx, fields)
    if deepspeed_config is not None or accelerate_config is not None:
        # The file names the engine; what is said beside it may only agree.
        stage: object = int(zero) if zero is not None and zero.isdecimal() else zero
        named = {
            "engine": engine, "precision": precision, "zero_stage": stage,
            "fsdp_strategy": fsdp_strategy,
        }  # fmt: skip
        given |= {name: value for name, value in named.items() if value is not None}
        engine = precision = zero = fsdp_strategy = None
    engines = [None] if engine is None else [part.strip() for part in engine.split(",")]
    bases = {
        each: read_base(
            given,
            named={"engine": each or (zero and "deepspeed"), "precision": precision},
            setup_file=setup_file,
            preset=preset,
            training_args=training_args,
            deepspeed_config=deepspeed_config,
            accelerate_config=accelerate_config,
        )
        for each in engines
    }
    base = bases[engines[0]]
    if spec is None:
        named_model = model_of(base, setup_file)
        spec = load_model(
            named_model, task, family=family, num_labels=num_labels, revision=revision, token=token,
            allow_guess=allow_guess, allow_unknown_keys=allow_unknown_keys,
        )  # fmt: skip
    setups = [
        setup
        for each in engines
        for setup in _setups(
            bases[each],
            precision=precision,
            engine=each,
            zero=zero if _is_of(each, "deepspeed", engines) else None,
            offload=offload,
            offload_param=offload_param,
            fsdp_strategy=fsdp_strategy if _is_of(each, "fsdp", engines) else None,
        )
    ]
    if global_batch_size is not None:
        setups = _with_global_batch(ctx, setups, global_batch_size)
    gpus = chosen_gpus(gpu, gpu_memory, attention=setups[0].chosen_kernels.attention.value)
    exact = exact or reserved or len(setups) == 1
    from memplan import cli
    from memplan.search import together
    from memplan.search.cores import usable_cores
    from memplan.search.side_by_side import SideBySide

    if cli.owns_process:
        together.num_cores = usable_cores()
    compared = SideBySide(
        model=spec,
        setups=setups,
        gpus=gpus,
        node_memory_bytes=node_memory(cpu_memory) if cpu_memory is not None else None,
        notes=base.notes,
        exact=exact,
        says_least=exact or output_format in (OutputFormat.JSON, OutputFormat.CSV),
    )
    rows = compared.rows(meanwhile=_prepare_tables if output_format is OutputFormat.TABLE else None)
    if any(each.lengths is not None for each in setups):
        from memplan.search.lengths import with_batches

        rows = [[with_batches(each, exact=exact) for each in row] for row in rows]
    if emit is not None:
        from memplan.cli.emitting import emit_only

        emit_only([row[0] for row in rows], emit, output)
    elif per_rank:
        _show_ranks(rows, output_format)
    else:
        everywhere = gpu is not None or gpu_memory is not None or len(rows) == 1
        _show(
            rows,
            output_format,
            everywhere=everywhere,
            exact=exact,
            legend=legend,
            reserved=reserved,
        )
    if checks is not None:
        from memplan.cli.checking import check_rows

        for_people = emit is None and output_format is OutputFormat.TABLE
        check_rows(rows, checks, spec, sys.stdout if for_people else sys.stderr)


TABLES_ONLY = frozenset({"deepspeed_formula", "additional_buffer_factor", "largest_layer"})
"""Options of DeepSpeed's tables, by the command's parameter."""
TABLES_USE = TABLES_ONLY | {"deepspeed", "params", "num_gpus", "num_nodes", "output_format"}
"""What DeepSpeed's tables make use of, beside a model."""
COUNTED_FROM_MODEL = frozenset(
    {
        "model",
        "task",
        "family",
        "allow_guess",
        "allow_unknown_keys",
        "num_labels",
        "revision",
        "token",
    }
)
"""What they make use of, beside those, where a model is counted."""
EMIT_IGNORES = frozenset({"exact", "legend", "output_format", "reserved"})
"""What is not looked at where a setup is written down instead."""


def given_fields(ctx: typer.Context, fields: "dict[str, object]") -> "dict[str, object]":
    """Those fields that were given on the command line, not left at their defaults.

    What several options make is there because one of them was given.
    """
    found = group_fields(ctx.params)
    for name, value in fields.items():
        source = ctx.get_parameter_source(FIELD_PARAMETERS.get(name, name))
        if source is not None and source.name == "COMMANDLINE":
            found.setdefault(name, value)
    return found


def _setups(
    given: "BaseSetup",
    *,
    precision: str | None,
    engine: str | None,
    zero: str | None,
    offload: str | None,
    offload_param: str | None,
    fsdp_strategy: str | None,
) -> "list[TrainingSetup]":
    """The setups to show: one where engine and stage are named, else all that are compared."""
    from memplan.cli.ranges import parse_range
    from memplan.search.comparison import Wanted, comparison_setups
    from memplan.training.precision import Engine
    from memplan.training.setup import ZeroStage, coerce_enum

    base = _with_named(given.setup, precision, engine, fsdp_strategy)
    stages = None
    if zero is not None:
        stages = tuple(
            coerce_enum("zero", stage, ZeroStage) for stage in parse_range(zero, option="--zero")
        )
    wanted = Wanted(
        engine=coerce_enum("engine", engine, Engine) if engine is not None else None,
        stages=stages,
        offload=_place("offload", offload),
        offload_param=_place("offload_param", offload_param),
    )
    if given.engine_fixed and engine is None:
        # A file's engine and stage stay, unless another one is named beside it.
        if wanted.is_open:
            return [base]
        kept = (base.zero_stage,) if stages is None and base.zero_stage is not None else stages
        wanted = replace(wanted, engine=base.chosen_engine, stages=kept)
    return comparison_setups(base, wanted)


def _is_of(engine: str | None, owner: str, engines: "Sequence[str | None]") -> bool:
    """Whether an option of ``owner``'s is for this engine: of several, it is for the owner alone."""
    named = [each for each in engines if each is not None and each.startswith(owner)]
    return engine in named or not named


def _with_global_batch(
    ctx: typer.Context, setups: "list[TrainingSetup]", global_batch_size: int
) -> "list[TrainingSetup]":
    """The setups with as many accumulation steps as make up the global batch."""
    from memplan.cli.unused import refuse
    from memplan.search.grid import with_global_batch

    if given_fields(ctx, {"gradient_accumulation_steps": None}):
        refuse("--global-batch-size", ["--gradient-accumulation, which follows from it"])
    return [with_global_batch(each, global_batch_size) for each in setups]


def _place(name: str, text: str | None) -> "Offload | None":
    from memplan.training.setup import Offload, coerce_enum

    return coerce_enum(name, text, Offload) if text is not None else None


def _with_named(
    base: "TrainingSetup", precision: str | None, engine: str | None, fsdp_strategy: str | None
) -> "TrainingSetup":
    """The base in the precision and with the FSDP strategy named, under an engine that has both."""
    from memplan.training.precision import Engine, Precision, engines_with
    from memplan.training.setup import FsdpStrategy, coerce_enum

    changes: dict[str, Any] = {}
    if fsdp_strategy is not None:
        changes["fsdp_strategy"] = coerce_enum("fsdp_strategy", fsdp_strategy, FsdpStrategy)
        changes["engine"] = engine or Engine.FSDP
    if precision is not None:
        chosen = changes["precision"] = coerce_enum("precision", precision, Precision)
        engines = engines_with(chosen)
        if "engine" not in changes and (engine is not None or base.chosen_engine not in engines):
            changes["engine"] = engine or min(engines, key=lambda each: each.value)
    return replace(base, **changes) if changes else base


def _show_ranks(rows: "list[list[Estimate]]", output_format: OutputFormat) -> None:
    """Write every distinct rank of the rows."""
    from memplan.report.ranks import MARKDOWN_COLUMNS, print_ranks, rank_rows

    if output_format is not OutputFormat.TABLE:
        flat = list(rank_rows([each for row in rows for each in row]))
        _write_flat(flat, rows, output_format, MARKDOWN_COLUMNS)
        return
    from memplan.report.console import TerminalConsole

    print_ranks(TerminalConsole(), rows)


def _write_flat(
    flat: "list[dict[str, object]]",
    rows: "Sequence[Sequence[Estimate]]",
    output_format: OutputFormat,
    markdown_columns: tuple[str, ...],
    *,
    hints: "list[dict[str, object]] | None" = None,
) -> None:
    """Write flat rows in a format for scripts, with what was assumed for any of them."""
    from memplan.cli.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.rows import rows_csv, rows_json, rows_markdown

    if output_format is OutputFormat.JSON:
        said = (text for row in rows for each in row for text in (*each.assumptions, *each.notes))
        say(
            rows_json(
                flat,
                schema_version=SCHEMA_VERSION,
                assumptions=list(dict.fromkeys(said)),
                about=about(rows[0][0].model),
                hints=hints,
            )
        )
    elif output_format is OutputFormat.CSV:
        say(rows_csv(flat))
    else:
        say(rows_markdown(flat, markdown_columns))


def _prepare_tables() -> None:
    """Import what a table is drawn with, which takes as long as two rows."""
    import memplan.report.console
    import memplan.report.estimate
    import memplan.search.advice  # noqa: F401


def _show(
    rows: "Sequence[Sequence[Estimate]]",
    output_format: OutputFormat,
    *,
    everywhere: bool,
    exact: bool,
    legend: bool,
    reserved: bool,
) -> None:
    """Write the rows; ``everywhere``: look for the largest micro-batch of each, on each GPU."""
    if output_format is not OutputFormat.TABLE:
        if output_format is OutputFormat.MARKDOWN:
            _show_markdown(rows, everywhere=everywhere, exact=exact)
            return
        from memplan.report.hints import hint_rows, hinted_rows
        from memplan.search.advice import hints_for

        found = hints_for(rows[0][0].model, rows)
        flat = hinted_rows(rows, found)
        _write_flat(flat, rows, output_format, (), hints=hint_rows(rows, found))
        return
    from memplan.report.answer import best_places, simplest_first
    from memplan.report.console import TerminalConsole
    from memplan.report.estimate import print_account, print_comparison
    from memplan.search.advice import hints_for

    console = TerminalConsole()
    rows = simplest_first(rows)
    # Where no GPU is named there are three, and to search every row would take longer than the
    # table itself.
    hints = hints_for(rows[0][0].model, rows, None if everywhere else best_places(rows))
    if len(rows) == 1:
        print_account(console, rows[0], hints, legend=legend, reserved=reserved)
    else:
        print_comparison(console, rows, hints, exact=exact, legend=legend, reserved=reserved)


def _show_markdown(rows: "Sequence[Sequence[Estimate]]", *, everywhere: bool, exact: bool) -> None:
    """Write the answer for people who read it elsewhere."""
    from memplan import __version__
    from memplan.report.answer import best_places, simplest_first
    from memplan.report.markdown import estimate_markdown
    from memplan.search.advice import hints_for

    rows = simplest_first(rows)
    hints = hints_for(rows[0][0].model, rows, None if everywhere else best_places(rows))
    say(estimate_markdown(rows, hints, exact=exact, version=__version__))
