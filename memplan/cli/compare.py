"""``memplan compare``."""

from typing import TYPE_CHECKING

from memplan.cli.option_table import Values
from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    FamilyOption,
    FormatOption,
    ModelArgument,
    NumGpusOption,
    NumLabelsOption,
    NumNodesOption,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.setting_options import NO_SETTINGS, setting_fields, takes_settings
from memplan.cli.terminal import say
from memplan.cli.training_options import EngineOption, PrecisionOption, ZeroOption

if TYPE_CHECKING:
    from memplan.training.setup import TrainingSetup


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
    model: ModelArgument,
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
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Set memplan's figure beside published formulas, each with what it leaves out."""
    from memplan.cli.single import check_target_length
    from memplan.report.compare import (
        compare_assumptions,
        compare_methods,
        print_methods,
        write_methods,
    )
    from memplan.sources.models import load_model
    from memplan.training.setup import TrainingSetup

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


def _setups(
    base: "TrainingSetup", *, precision: str | None, engine: str | None, zero: str | None
) -> "list[TrainingSetup]":
    """Every ZeRO stage where there are GPUs to share over and none is named."""
    from dataclasses import replace

    from memplan.cli.single import with_engine
    from memplan.training.choices import ZeroStage
    from memplan.training.precision import Engine

    chosen = with_engine(base, precision=precision, engine=engine, zero=zero)
    if zero is not None or chosen.chosen_engine is not Engine.DEEPSPEED:
        return [chosen]
    return [replace(chosen, zero_stage=stage) for stage in ZeroStage]
