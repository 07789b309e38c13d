"""``memplan flops``."""

from typing import Annotated

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    FamilyOption,
    FormatOption,
    ModelArgument,
    NumGpusOption,
    NumLabelsOption,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.taking_settings import NO_SETTINGS, takes_settings
from memplan.cli.terminal import say
from memplan.options.panels import TRAINING_PANEL
from memplan.options.settings import setting_fields
from memplan.options.table import Values


@takes_settings(
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "target_seq_len", "checkpointing",
    "kernels", "attention", "freeze",
)  # fmt: skip
def flops(
    model: ModelArgument,
    num_gpus: NumGpusOption = 1,
    settings: Values = NO_SETTINGS,
    scores: Annotated[
        str,
        typer.Option(
            "--scores",
            metavar="WHICH",
            help="Attention scores that count: full, or causal (what the mask lets through).",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = "full",
    task: TaskOption = None,
    family: FamilyOption = None,
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """Count the FLOPs of a training step, by component and by others' formulas."""
    from memplan.compute.flops import ScoreCount
    from memplan.estimator.flops import estimate_flops
    from memplan.options.single import check_target_length
    from memplan.report.flops import (
        flops_assumptions,
        flops_methods,
        flops_rows,
        print_flops,
        write_flops,
    )
    from memplan.sources.models import load_model
    from memplan.training.coercion import coerce_enum
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
    setup = TrainingSetup(
        num_gpus=num_gpus,
        **setting_fields(settings),  # type: ignore[arg-type]
    ).resolve(spec.context_length)
    counted = estimate_flops(spec, setup, scores=coerce_enum("scores", scores, ScoreCount))
    methods = flops_methods(spec, setup)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_flops(TerminalConsole(), spec, setup, counted, methods)
        return
    rows = flops_rows(counted, methods, setup)
    say(write_flops(rows, output_format.value, flops_assumptions(spec, setup, counted)))
