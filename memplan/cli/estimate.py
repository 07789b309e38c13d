"""``memplan estimate``."""

import sys
from typing import Annotated, Any

import typer

from memplan.cli.estimate_output import prepare_tables, show, show_ranks
from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    AssumptionsOption,
    CpuMemoryOption,
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
from memplan.cli.pictures import (
    ChartOption,
    ReportOption,
    check_pictures,
    estimate_pictures,
    estimate_report,
    print_charts,
    write_page,
)
from memplan.cli.sweep_options import (
    AllowOption,
    AnnotateOption,
    BaselineOption,
    CheckOption,
    EmitOption,
    FailOnOption,
    GlobalBatchOption,
    OutputOption,
    ToleranceOption,
    UnmatchedOption,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_settings, takes_times
from memplan.cli.terminal import remark, say
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
)
from memplan.options.axes import read_concessions
from memplan.options.largest import or_max, read_whole
from memplan.options.panels import MODEL_PANEL, OUTPUT_PANEL
from memplan.options.run_times import time_question
from memplan.options.table import Values

DEEPSPEED_PANEL = "DeepSpeed's own tables"


def _table_option(name: str, help_text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=DEEPSPEED_PANEL)


@takes_times
@takes_settings(finds_largest=True)
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
    allow: AllowOption = None,
    precision: PrecisionOption = None,
    num_layers: Annotated[
        Any,
        typer.Option(
            "--num-layers",
            metavar="N|max",
            parser=or_max(read_whole),
            help="Layers of each stack, in the model's own pattern; max: the most that fit. "
            "[default: the model's]",
            rich_help_panel=MODEL_PANEL,
            show_default=False,
        ),
    ] = None,
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
    legend: LegendOption = False,
    assumptions: AssumptionsOption = False,
    per_rank: Annotated[
        bool,
        typer.Option(
            "--per-rank",
            help="Print every distinct rank, the fullest first, instead of the worst one's verdict.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    times: Values = NO_SETTINGS,
    lifetimes: Annotated[
        bool,
        typer.Option(
            "--lifetimes",
            help="Print the peak by how long its bytes are held, and what lowers each.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    reserved: Annotated[
        bool,
        typer.Option(
            "--reserved",
            help="Show what PyTorch's allocator reserves too (nvidia-smi's figure without the "
            "context).",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    output_format: FormatOption = OutputFormat.TABLE,
    emit: EmitOption = None,
    output: OutputOption = None,
    report: ReportOption = None,
    chart: ChartOption = False,
    check: CheckOption = None,
    fail_on: FailOnOption = None,
    baseline: BaselineOption = None,
    tolerance: ToleranceOption = None,
    unmatched: UnmatchedOption = None,
    annotate: AnnotateOption = None,
) -> None:
    """Estimate the memory of a training run, and say on which GPUs it fits."""
    from memplan.cli.asked import asked_of
    from memplan.cli.unused import refuse_unused, refuse_without
    from memplan.options.estimating import estimate_question

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
    check_pictures(report, chart=chart, is_table=output_format is OutputFormat.TABLE)
    question = time_question(times)
    checks = None
    if any(each is not None for each in (check, fail_on, baseline, tolerance, unmatched, annotate)):
        from memplan.cli.checking import read_checks

        checks = read_checks(check, fail_on, baseline, tolerance, unmatched, annotate)
    asked = asked_of(ctx)
    spec = asked.model(model) if model is not None else None
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
    judged = estimate_question(asked, spec, alone=False, remark=remark)
    everywhere = gpu is not None or gpu_memory is not None or len(judged.setups) == 1
    from memplan import cli
    from memplan.search import together
    from memplan.search.cores import usable_cores
    from memplan.search.side_by_side import SideBySide

    if cli.owns_process:
        together.num_cores = usable_cores()
    compared = SideBySide(
        model=judged.model,
        setups=judged.setups,
        gpus=judged.gpus,
        node_memory_bytes=judged.node_memory_bytes,
        notes=judged.notes,
        says_needs=everywhere or output_format in (OutputFormat.JSON, OutputFormat.CSV),
    )
    rows = compared.rows(meanwhile=prepare_tables if output_format is OutputFormat.TABLE else None)
    if any(each.lengths is not None for each in judged.setups):
        from memplan.search.lengths import with_batches

        rows = [[with_batches(each) for each in row] for row in rows]
    written = write_page(estimate_report(rows), report) if report is not None else None
    if emit is not None:
        from memplan.cli.emitting import emit_only

        emit_only(rows, emit, output, question)
    elif per_rank:
        show_ranks(rows, output_format)
    else:
        show(
            rows,
            output_format,
            everywhere=everywhere,
            legend=legend,
            assumptions=assumptions,
            reserved=reserved,
            lifetimes=lifetimes,
            question=question,
            allow=read_concessions(allow),
        )
    if chart:
        print_charts(estimate_pictures(rows))
    if written is not None:
        say(written)
    if checks is not None:
        from memplan.cli.checking import check_rows

        for_people = emit is None and output_format is OutputFormat.TABLE
        check_rows(rows, checks, judged.model, sys.stdout if for_people else sys.stderr)


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
EMIT_IGNORES = frozenset(
    {
        "allow",
        "assumptions",
        "chart",
        "legend",
        "lifetimes",
        "output_format",
        "report",
        "reserved",
    }
)
"""What is not looked at where a setup is written down instead."""
