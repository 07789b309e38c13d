"""``memplan compare``."""

from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    FamilyOption,
    FormatOption,
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
from memplan.cli.terminal import say
from memplan.cli.training_options import EngineOption, PrecisionOption, ZeroOption
from memplan.options.numbers import read_number
from memplan.options.settings import setting_fields
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.report.rule_table import RuleCase
    from memplan.training.setup import TrainingSetup

GIVEN_PANEL = "Without a MODEL, one table of stages and checkpointing"


@takes_settings(
    "micro_batch_size",
    "seq_len",
    "target_seq_len",
    "optimizer",
    "checkpointing",
    "kernels",
    "attention",
)
def compare(
    ctx: typer.Context,
    model: OptionalModelArgument = None,
    num_gpus: NumGpusOption = 1,
    num_nodes: NumNodesOption = None,
    engine: EngineOption = None,
    zero: ZeroOption = None,
    settings: Values = NO_SETTINGS,
    precision: PrecisionOption = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="N", help="Parameters: 10B.", rich_help_panel=GIVEN_PANEL),
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option(
            "--hidden-size", metavar="N", min=1, help="Of a layer.", rich_help_panel=GIVEN_PANEL
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", min=1, help="How many.", rich_help_panel=GIVEN_PANEL),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            "--heads", metavar="N", min=1, help="Of attention.", rich_help_panel=GIVEN_PANEL
        ),
    ] = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Set memplan's figure beside published formulas, each with what it leaves out."""
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
    if model is None:
        msg = "name a MODEL (memplan models lists the built-in ones), or give --params"
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
    check_target_length(spec, settings["target_seq_len"])
    base = TrainingSetup(
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        **setting_fields(settings),  # type: ignore[arg-type]
    )
    setups = _setups(base, precision=precision, engine=engine, zero=zero)
    rows, refused = compare_methods(spec, setups)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_methods(TerminalConsole(), spec, setups[0], rows, refused)
        return
    assumptions = compare_assumptions(spec, setups[0])
    say(write_methods(rows, output_format.value, assumptions))


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
