"""``memplan compare``."""

from typing import TYPE_CHECKING, Annotated, Any

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
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
    complete_models,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_settings, takes_times
from memplan.cli.terminal import remark, say, say_legend
from memplan.cli.training_options import (
    EngineOption,
    EngineOptionOption,
    OffloadOption,
    OffloadParamOption,
    PrecisionOption,
    ZeroOption,
)
from memplan.options.numbers import read_number
from memplan.options.settings import setting_fields
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.report.rule_table import RuleCase
    from memplan.training.setup import TrainingSetup

PAIR_PANEL = "What is compared"
GIVEN_PANEL = "Published formulas"


def _formula_option(name: str, help_text: str, least: int | None = 1) -> Any:
    return typer.Option(name, metavar="N", min=least, help=help_text, rich_help_panel=GIVEN_PANEL)


@takes_times
@takes_settings()
def compare(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [OTHER]",
            help="A model, as `estimate` takes it, or two.",
            show_default=False,
            autocompletion=complete_models,
        ),
    ] = None,
    vs: Annotated[
        str | None,
        typer.Option(
            "--vs",
            metavar="OPTIONS",
            help='The same with these options: "--zero 3 --batch-size 2".',
            rich_help_panel=PAIR_PANEL,
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="FILE FILE",
            help="Two files, each with a whole setup, as `estimate --setup` reads them.",
            rich_help_panel=PAIR_PANEL,
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME NAME",
            help="What two training stacks do by default: trl-sft unsloth.",
            rich_help_panel=PAIR_PANEL,
        ),
    ] = None,
    formulas: Annotated[
        bool,
        typer.Option(
            "--formulas",
            help="Set memplan beside published formulas instead, each with what it leaves out.",
            rich_help_panel=GIVEN_PANEL,
        ),
    ] = False,
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
    params: Annotated[str | None, _formula_option("--params", "Parameters: 10B.", None)] = None,
    hidden_size: Annotated[int | None, _formula_option("--hidden-size", "Of a layer.")] = None,
    layers: Annotated[int | None, _formula_option("--layers", "How many.")] = None,
    heads: Annotated[int | None, _formula_option("--heads", "Of attention.")] = None,
    times: Values = NO_SETTINGS,
    legend: LegendOption = False,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Set two setups side by side: what moved, verdicts, time, money; or published formulas."""
    from memplan.cli.compare_sides import is_a_pair
    from memplan.cli.unused import refuse_unused, refuse_without
    from memplan.errors import UsageError
    from memplan.options.single import check_target_length
    from memplan.report.compare import (
        compare_assumptions,
        compare_methods,
        print_methods,
        write_methods,
    )
    from memplan.sources.models import load_model
    from memplan.training.setup import TrainingSetup

    if params is not None:
        refuse_unused(ctx, "--params", TABLE_USES)
        case = _case(ctx, params)
        if output_format is OutputFormat.TABLE:
            from memplan.report.console import TerminalConsole
            from memplan.report.rule_table import print_rule_table

            print_rule_table(TerminalConsole(), case)
            return
        from memplan.report.rule_table import write_rule_table

        say(write_rule_table(case, output_format.value))
        return
    refuse_without(ctx, {"hidden_size", "layers", "heads"}, "--params")
    words = list(model or ())
    if not formulas and is_a_pair(words, ctx.params):
        _show_pair(ctx, words, times, output_format)
        say_legend(legend, is_table=output_format is OutputFormat.TABLE)
        return
    if len(words) != 1:
        msg = (
            'name a MODEL and what differs, as in compare llama-3.1-8b --vs "--zero 3", or two '
            "models (memplan models lists the built-in ones)"
        )
        raise UsageError(msg)
    refuse_unused(ctx, "--formulas", FORMULAS_USE)
    if not formulas:
        remark(
            "published formulas, which are `memplan compare MODEL --formulas`; two setups: "
            'memplan compare MODEL --vs "--zero 3"'
        )
    spec = load_model(
        words[0],
        task,
        family=family,
        allow_guess=allow_guess,
        allow_unknown_keys=allow_unknown_keys,
        num_labels=num_labels,
        revision=revision,
        token=token,
    )
    check_target_length(spec, settings["target_seq_len"])
    base = TrainingSetup(
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        **{
            name: value
            for name, value in setting_fields(settings).items()
            if name in FORMULA_FIELDS
        },  # type: ignore[arg-type]
    )
    setups = _setups(base, precision=precision, engine=engine, zero=zero)
    rows, refused = compare_methods(spec, setups)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_methods(TerminalConsole(), spec, setups[0], rows, refused)
        return
    assumptions = compare_assumptions(spec, setups[0])
    say(write_methods(rows, output_format.value, assumptions))


FORMULA_FIELDS = frozenset({
    "micro_batch_size", "seq_len", "target_seq_len", "optimizer", "checkpointing", "kernels", "attention",
})  # fmt: skip
"""Of a setup, what published formulas go by."""
FORMULAS_USE = frozenset({
    "model", "formulas", "num_gpus", "num_nodes", "engine", "zero", "batch_size", "seq_len",
    "target_seq_len", "optimizer", "checkpointing", "kernels", "attention", "precision", "task", "family",
    "allow_guess", "allow_unknown_keys", "num_labels", "revision", "token", "output_format",
})  # fmt: skip
"""What the table of formulas makes use of."""


def _show_pair(
    ctx: typer.Context, words: list[str], times: Values, output_format: OutputFormat
) -> None:
    """Estimate both, and write what moved."""
    from memplan.cli.compare_sides import answer_of, typed_sides
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.options.run_times import time_question
    from memplan.report.versus import VERSUS_SCHEMA_VERSION, Side, print_versus, versus_rows
    from memplan.search.advice import hints_for

    question = time_question(times) or TimeQuestion()
    first, second = (
        Side(
            label=each.label,
            name=each.name,
            answer=answer,
            hints=hints_for(answer.model, [[answer]]),
        )
        for each in typed_sides(ctx, words)
        for answer in [answer_of(each)]
    )
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_versus(TerminalConsole(), (first, second), question)
        return
    from memplan.report.rows import rows_csv, rows_json, rows_markdown

    rows = versus_rows((first, second), question)
    if output_format is OutputFormat.JSON:
        said = dict.fromkeys((*first.answer.assumptions, *second.answer.assumptions))
        say(rows_json(rows, schema_version=VERSUS_SCHEMA_VERSION, assumptions=list(said)))
    else:
        say(rows_csv(rows) if output_format is OutputFormat.CSV else rows_markdown(rows))


TABLE_USES = frozenset({
    "params", "hidden_size", "layers", "heads", "num_gpus", "batch_size", "seq_len", "precision", "output_format",
})  # fmt: skip
"""What the table for given sizes makes use of."""
_GIVEN_TOKENS = 2048


def _case(ctx: typer.Context, params: str) -> "RuleCase":
    """The sizes that are given; all of a layer's are needed.

    Raises ``UsageError`` where one is missing, or is no number.
    """
    from memplan.errors import UsageError
    from memplan.report.rule_table import RuleCase
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import PRECISIONS, Precision

    asked = ctx.params
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("hidden_size", "layers", "heads")
        if not asked[name]
    ]
    if missing:
        msg = f"--params: its table needs {' and '.join(missing)} too"
        raise UsageError(msg)
    try:
        count = read_number(params)
    except ValueError as error:
        msg = f"--params: {error}"
        raise UsageError(msg) from error
    if not count:
        msg = "--params: a model has at least 1 parameter"
        raise UsageError(msg)
    width = 2
    if asked["precision"] is not None:
        formats = PRECISIONS[coerce_enum("precision", asked["precision"], Precision)]
        width = (formats.autocast or formats.compute).num_bytes
    return RuleCase(
        num_params=count,
        hidden_size=asked["hidden_size"],
        num_layers=asked["layers"],
        num_heads=asked["heads"],
        seq_len=asked["seq_len"] or _GIVEN_TOKENS,
        batch_size=asked["batch_size"] or 1,
        num_gpus=asked["num_gpus"],
        precision=width,
    )


def _setups(
    base: "TrainingSetup", *, precision: str | None, engine: str | None, zero: str | None
) -> "list[TrainingSetup]":
    """Every ZeRO stage where there are GPUs to share over and none is named."""
    from dataclasses import replace

    from memplan.options.single import with_engine
    from memplan.training.choices import ZeroStage
    from memplan.training.precision import Engine

    chosen = with_engine(base, precision=precision, engine=engine, zero=zero)
    if zero is not None or chosen.chosen_engine is not Engine.DEEPSPEED:
        return [chosen]
    return [replace(chosen, zero_stage=stage) for stage in ZeroStage]
