"""``memplan flops``."""

from memplan.cli.output.terminal import say
from memplan.cli.taking import MODEL_ARGUMENT, NO_VALUES, Context, takes
from memplan.options.rows.settings import SETTING_OPTIONS, setting_fields
from memplan.options.rows.shared import FORMAT, GPUS, MODEL, OutputFormat
from memplan.options.table import Option, Values

COUNTED_FIELDS = frozenset({
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "target_seq_len", "checkpointing",
    "kernels", "attention", "freeze",
})  # fmt: skip
"""Fields of a setup that the count depends on."""
SETTINGS = tuple(option for option in SETTING_OPTIONS if option.field in COUNTED_FIELDS)
SCORES = Option(
    flag="--scores", default="full", metavar="WHICH",
    help_text="Attention scores that count: full, or causal (what the mask lets through).",
)  # fmt: skip


@takes(GPUS, *SETTINGS, SCORES, *MODEL, FORMAT, argument=MODEL_ARGUMENT)
def flops(ctx: Context, model: str, values: Values = NO_VALUES) -> None:
    """Count the FLOPs of a training step, by component and by others' formulas."""
    from memplan.cli.words.asked import asked_of
    from memplan.compute.flops import ScoreCount
    from memplan.estimator.flops import estimate_flops
    from memplan.options.single import check_target_length
    from memplan.report.lookups.flops import (
        flops_assumptions,
        flops_methods,
        flops_rows,
        print_flops,
        write_flops,
    )
    from memplan.training.coercion import coerce_enum
    from memplan.training.setup import TrainingSetup

    spec = asked_of(ctx).model(model)
    check_target_length(spec, values["target_seq_len"])
    setup = TrainingSetup(
        num_gpus=values["gpus"],
        **setting_fields(values),  # type: ignore[arg-type]
    ).resolve(spec.context_length)
    scores = coerce_enum("scores", values["scores"], ScoreCount)
    counted, methods = estimate_flops(spec, setup, scores=scores), flops_methods(spec, setup)
    if values["format"] is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_flops(TerminalConsole(), spec, setup, counted, methods)
        return
    rows = flops_rows(counted, methods, setup)
    say(write_flops(rows, values["format"].value, flops_assumptions(spec, setup, counted)))
