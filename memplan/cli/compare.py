"""``memplan compare``."""

from typing import Never

from memplan.cli.compare_sides import ASKED
from memplan.cli.output.terminal import remark, say_legend, say_rows
from memplan.cli.taking import NO_VALUES, Argument, Context, takes
from memplan.options.rows.shared import FORMAT, LEGEND, MODEL, OutputFormat
from memplan.options.run_times import TIME_OPTIONS
from memplan.options.table import Option, Values

PAIR_PANEL = "What is compared"
GIVEN_PANEL = "Published formulas"
PAIR = (
    Option(
        flag="--vs", kind=str | None, metavar="OPTIONS", panel=PAIR_PANEL,
        help_text='The same with these options: "--zero 3 --batch-size 2".',
    ),
    Option(
        flag="--setup", kind=list[str] | None, metavar="FILE FILE", panel=PAIR_PANEL,
        help_text="Two files, each with a whole setup, as `estimate --setup` reads them.",
    ),
    Option(
        flag="--preset", kind=list[str] | None, metavar="NAME NAME", panel=PAIR_PANEL,
        help_text="What two training stacks do by default: trl-sft unsloth.",
    ),
)  # fmt: skip
"""What tells the two apart."""
FORMULAS = Option(
    flag="--formulas", kind=bool, default=False, metavar=None, panel=GIVEN_PANEL,
    help_text="Set memplan beside published formulas instead, each with what it leaves out.",
)  # fmt: skip
PARAMS = Option(
    flag="--params",
    kind=str | None,
    metavar="N",
    panel=GIVEN_PANEL,
    help_text="Of no MODEL, but so many parameters: 10B; ZeRO stages down, checkpointing across.",
)
SIZES = tuple(
    Option(flag=flag, kind=int | None, metavar="N", minimum=1, panel=GIVEN_PANEL, help_text=told)
    for flag, told in (
        ("--hidden-size", "Of a layer."),
        ("--layers", "How many."),
        ("--heads", "Of attention."),
    )
)
"""What a layer is, where no model is named."""


ARGUMENT = Argument(
    metavar="MODEL [OTHER]",
    help_text="A model, as `estimate` takes it, or two.",
    kind=list[str] | None,
)


@takes(*PAIR, FORMULAS, *ASKED, PARAMS, *SIZES, *TIME_OPTIONS, LEGEND, FORMAT, argument=ARGUMENT)
def compare(
    ctx: Context,
    model: list[str] | None = None,
    values: Values = NO_VALUES,
) -> None:
    """Set two setups side by side: what moved, verdicts, time, money; or published formulas."""
    from memplan.cli.compare_sides import is_a_pair
    from memplan.cli.words.unused import refuse_unused, refuse_without

    if values["params"] is not None:
        refuse_unused(ctx, "--params", TABLE_USES)
        from memplan.cli.formulas import show_rule_table

        show_rule_table(values)
        return
    refuse_without(ctx, {option.parameter for option in SIZES}, "--params")
    words = list(model or ())
    if not values["formulas"] and is_a_pair(words, values):
        _show_pair(ctx, words, values)
        say_legend(values["legend"], is_table=values["format"] is OutputFormat.TABLE)
        return
    if len(words) != 1:
        _refuse_nothing_to_compare()
    refuse_unused(ctx, "--formulas", FORMULAS_USE)
    if not values["formulas"]:
        remark(
            "published formulas, which are `memplan compare MODEL --formulas`; two setups: "
            'memplan compare MODEL --vs "--zero 3"'
        )
    from memplan.cli.formulas import show_formulas

    show_formulas(ctx, words[0])


def _refuse_nothing_to_compare() -> Never:
    from memplan.errors import UsageError

    msg = (
        'name a MODEL and what differs, as in compare llama-3.1-8b --vs "--zero 3", or two '
        "models (memplan models lists the built-in ones)"
    )
    raise UsageError(msg)


FORMULAS_USE = frozenset({
    "model", "formulas", "gpus", "nodes", "engine", "zero", "batch_size", "seq_len", "target_seq_len",
    "optimizer", "checkpointing", "kernels", "attention", "precision", "format",
    *(option.parameter for option in MODEL),
})  # fmt: skip
"""What the table of formulas makes use of."""
TABLE_USES = frozenset({
    "params", "formulas", "hidden_size", "layers", "heads", "gpus", "batch_size", "seq_len", "precision", "format",
})  # fmt: skip
"""What the table for given sizes makes use of."""


def _show_pair(ctx: Context, words: list[str], values: Values) -> None:
    """Estimate both, and write what moved."""
    from memplan.cli.compare_sides import answer_of, typed_sides
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.options.run_times import time_question
    from memplan.report.versus import VERSUS_SCHEMA_VERSION, Side, print_versus, versus_rows
    from memplan.search.advice import hints_for

    question = time_question(values) or TimeQuestion()
    output_format = values["format"]
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
        from memplan.report.terminal.console import TerminalConsole

        print_versus(TerminalConsole(), (first, second), question)
        return
    answers = (first.answer, second.answer)
    said = dict.fromkeys(text for each in answers for text in (*each.assumptions, *each.notes))
    rows = versus_rows((first, second), question)
    say_rows(rows, output_format, list(said), schema_version=VERSUS_SCHEMA_VERSION)
