"""``memplan estimate --deepspeed``: the tables of DeepSpeed's own estimators."""

from typing import TYPE_CHECKING

from memplan.cli.output.terminal import say
from memplan.errors import UsageError
from memplan.options.numbers import read_number
from memplan.options.rows.shared import OutputFormat
from memplan.options.table import Values

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec


def show_deepspeed_tables(model: "ModelSpec | None", values: Values) -> None:
    """Print both tables for a model, or for counts given by hand."""
    from memplan.formulas.deepspeed import DeepSpeedFormula
    from memplan.report.lookups.deepspeed import (
        deepspeed_document,
        deepspeed_report,
        deepspeed_rows,
    )
    from memplan.training.coercion import coerce_enum
    from memplan.training.setup import TrainingSetup

    total, largest = _counts(model, values["params"], values["largest_layer"])
    output_format, num_gpus = values["format"], values["gpus"]
    report = deepspeed_report(
        total_params=total,
        largest_layer_params=largest,
        num_gpus_total=num_gpus,
        num_nodes=TrainingSetup(num_gpus=num_gpus, num_nodes=values["nodes"]).nodes,
        formula=coerce_enum("deepspeed_formula", values["deepspeed_formula"], DeepSpeedFormula),
        additional_buffer_factor=values["additional_buffer_factor"],
    )
    if output_format is OutputFormat.TABLE:
        from memplan.report.lookups.deepspeed import print_deepspeed
        from memplan.report.terminal.console import TerminalConsole

        print_deepspeed(TerminalConsole(), report)
    elif output_format is OutputFormat.JSON:
        from memplan.report.rows.written import json_text

        say(json_text(deepspeed_document(report), indent=2))
    else:
        from memplan.report.rows.written import rows_csv, rows_markdown

        rows = deepspeed_rows(report)
        say(rows_csv(rows) if output_format is OutputFormat.CSV else rows_markdown(rows))


def _counts(
    model: "ModelSpec | None", params: str | None, largest_layer: str | None
) -> tuple[int, int | None]:
    """Total and largest-layer parameters: given by hand, or the base model's own."""
    if params is not None:
        try:
            largest = read_number(largest_layer) if largest_layer is not None else None
            return read_number(params), largest
        except ValueError as error:
            raise UsageError(str(error)) from error
    if model is None:
        msg = "--deepspeed: name a MODEL, or give --params"
        raise UsageError(msg)
    from memplan.graph.counts import count_parameters

    counts = count_parameters(model)
    return counts.base, counts.largest_layer
