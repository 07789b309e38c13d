"""``memplan compare --formulas``: memplan beside what others published."""

from typing import TYPE_CHECKING

from memplan.cli.output.terminal import say
from memplan.cli.taking import Context
from memplan.options.numbers import read_number
from memplan.options.rows.shared import OutputFormat
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.report.lookups.rule_table import RuleCase
    from memplan.training.setup import TrainingSetup


def show_formulas(ctx: Context, name: str) -> None:
    """Write the table of a model's methods."""
    from memplan.cli.words.asked import asked_of
    from memplan.options.rows.settings import setting_fields
    from memplan.options.single import check_target_length
    from memplan.report.formulas.methods import compare_methods
    from memplan.report.formulas.written import compare_assumptions, print_methods, write_methods
    from memplan.training.setup import TrainingSetup

    asked = asked_of(ctx)
    values, spec = asked.values, asked.model(name)
    check_target_length(spec, values["target_seq_len"])
    fields = setting_fields(values)
    base = TrainingSetup(
        num_gpus=values["gpus"],
        num_nodes=values["nodes"],
        **{name: fields[name] for name in FORMULA_FIELDS},  # type: ignore[arg-type]
    )
    setups = _setups(base, values)
    rows, refused = compare_methods(spec, setups)
    output_format = values["format"]
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_methods(TerminalConsole(), spec, setups[0], rows, refused)
        return
    say(write_methods(rows, output_format.value, compare_assumptions(spec, setups[0])))


FORMULA_FIELDS = (
    "micro_batch_size", "seq_len", "target_seq_len", "optimizer", "checkpointing", "kernels", "attention",
)  # fmt: skip
"""Of a setup, what published formulas go by."""


def _setups(base: "TrainingSetup", values: Values) -> "list[TrainingSetup]":
    """Every ZeRO stage where there are GPUs to share over and none is named."""
    from dataclasses import replace

    from memplan.options.single import with_engine
    from memplan.training.choices import ZeroStage
    from memplan.training.precision import Engine

    zero = values["zero"]
    chosen = with_engine(base, precision=values["precision"], engine=values["engine"], zero=zero)
    if zero is not None or chosen.chosen_engine is not Engine.DEEPSPEED:
        return [chosen]
    return [replace(chosen, zero_stage=stage) for stage in ZeroStage]


def show_rule_table(values: Values) -> None:
    """Write the rules of thumb for the sizes that are given."""
    from memplan.report.lookups.rule_table import print_rule_table, write_rule_table

    case, output_format = _case(values), values["format"]
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_rule_table(TerminalConsole(), case)
        return
    say(write_rule_table(case, output_format.value))


_GIVEN_TOKENS = 2048


def _case(values: Values) -> "RuleCase":
    """The sizes that are given; all of a layer's are needed.

    Raises ``UsageError`` where one is missing, or is no number.
    """
    from memplan.errors import UsageError
    from memplan.options.largest import without_max
    from memplan.report.lookups.rule_table import RuleCase

    asked = without_max(values)
    names = ("hidden_size", "layers", "heads")
    missing = [f"--{name.replace('_', '-')}" for name in names if not asked[name]]
    if missing:
        msg = f"--params: its table needs {' and '.join(missing)} too"
        raise UsageError(msg)
    return RuleCase(
        num_params=_parameters(asked["params"]),
        hidden_size=asked["hidden_size"],
        num_layers=asked["layers"],
        num_heads=asked["heads"],
        seq_len=asked["seq_len"] or _GIVEN_TOKENS,
        batch_size=asked["batch_size"] or 1,
        num_gpus=asked["gpus"],
        precision=_width(asked["precision"]),
    )


def _parameters(text: str) -> int:
    """How many there are. Raises ``UsageError`` for none, and for what is no number."""
    from memplan.errors import UsageError

    try:
        count = read_number(text)
    except ValueError as error:
        msg = f"--params: {error}"
        raise UsageError(msg) from error
    if not count:
        msg = "--params: a model has at least 1 parameter"
        raise UsageError(msg)
    return count


def _width(precision: str | None) -> int:
    """Of what is computed with [bytes]."""
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import PRECISIONS, Precision

    if precision is None:
        return 2
    formats = PRECISIONS[coerce_enum("precision", precision, Precision)]
    return (formats.autocast or formats.compute).num_bytes
