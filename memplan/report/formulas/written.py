"""Published formulas beside memplan, as people and scripts read them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.dtypes import DType
from memplan.formulas.parameters import (
    gpt_parameters,
    llama_feed_forward_size,
    llama_parameters,
)
from memplan.formulas.states import (
    MIXED_STATES,
)
from memplan.graph.counts import count_parameters
from memplan.model.spec import ModelSpec
from memplan.report.rows.written import rows_csv, rows_json, rows_markdown
from memplan.report.shape import shape_notes
from memplan.report.terminal.narrow import print_table
from memplan.training.optimizers.script import Stepped, TensorRole
from memplan.training.optimizers.script import state_bytes as optimizer_bytes
from memplan.training.optimizers.table import chosen
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup
from memplan.units import GIB, format_count, format_gib

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

from memplan.report.formulas.case import MethodRow, known_shape, numbers_of

COMPARE_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""


def method_rows(rows: Sequence[MethodRow]) -> list[dict[str, object]]:
    """Flat rows; bytes are integers, None where a method does not count."""
    return [
        {
            "method": row.method,
            "setting": row.setting,
            "states_bytes": row.states_bytes,
            "activations_bytes": row.activations_bytes,
            "total_bytes": row.total_bytes,
            "formula": row.formula,
            "source": row.source,
            "leaves_out": row.leaves_out,
        }
        for row in rows
    ]


def write_methods(rows: Sequence[MethodRow], output_format: str, assumptions: Sequence[str]) -> str:
    """Rows as JSON, CSV or Markdown."""
    flat = method_rows(rows)
    if output_format == "json":
        return rows_json(flat, schema_version=COMPARE_SCHEMA_VERSION, assumptions=assumptions)
    return rows_csv(flat) if output_format == "csv" else rows_markdown(flat)


def compare_assumptions(model: ModelSpec, setup: TrainingSetup) -> tuple[str, ...]:
    """What all methods are asked about."""
    resolved = setup.resolve(model.context_length)
    return (
        *model.assumptions,
        f"{resolved.num_gpus} GPU{'s' if resolved.num_gpus > 1 else ''}"
        + (f" on {resolved.nodes} nodes" if resolved.nodes > 1 else ""),
        f"{resolved.seq_len:,} tokens",
        f"micro-batch {resolved.micro_batch_size}",
        f"precision {resolved.chosen_precision.value}",
        *(f"in the formulas, {note}" for note in shape_notes(model)),
    )


def print_methods(
    console: "Console",
    model: ModelSpec,
    setup: TrainingSetup,
    rows: Sequence[MethodRow],
    refused: Sequence[str],
) -> None:
    """Print one line of figures per method, its formula and its gaps beside them."""
    from rich.text import Text

    params = format_count(count_parameters(model).total)
    head = f" ({model.task.value}), {params} parameters"
    if answer := answer_words(rows):
        console.print(Text(answer))
    console.print(Text.assemble((model.name, "bold"), head))
    asked = ", ".join(compare_assumptions(model, setup))
    console.print(Text(f"All are asked about: {asked}", style="dim"))
    console.print(Text(numbers_of(model, setup), style="dim"))
    notes = _notes(rows)
    print_table(console, _method_table(rows, notes), num_labels=2)
    for text, number in notes.items():
        console.print(Text(f"[{number}] {text}", style="dim"))
    for line in (
        *parameter_lines(model),
        *_footnotes(setup),
        *(f"memplan has no row: {reason}" for reason in refused),
    ):
        console.print(Text(line, style="dim"))


OWN = "memplan"
"""How the names of its own methods begin."""


NEAR = 0.1
"""How far from memplan's figure a formula's may be to be called near."""


def answer_words(rows: Sequence[MethodRow]) -> str:
    """What memplan says, and how many of the formulas come near it."""
    own = [row for row in rows if row.method.startswith(OWN)]
    whole = [row.total_bytes for row in rows if not row.method.startswith(OWN) and row.states_bytes]
    if not own or not whole:
        return ""
    wanted = own[0].total_bytes
    near = sum(abs(each - wanted) <= NEAR * wanted for each in whole)
    return (
        f"memplan: {format_gib(wanted)} ({own[0].setting}); of {len(whole)} published formulas {near} "
        f"within {NEAR:.0%} of it, {format_gib(min(whole), digits=1)} to {format_gib(max(whole), digits=1)}"
    )


def _notes(rows: Sequence[MethodRow]) -> dict[str, int]:
    """Source and gaps of every row, each once, numbered in the order they are met."""
    notes: dict[str, int] = {}
    for row in rows:
        notes.setdefault(_note(row), len(notes) + 1)
    return notes


def _note(row: MethodRow) -> str:
    return f"{row.source}. Left out: {row.leaves_out}."


def _method_table(rows: Sequence[MethodRow], notes: dict[str, int]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    table.add_column("of", no_wrap=True)
    for name in ("states", "activations", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("GiB by this formula", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        figures = (row.states_bytes, row.activations_bytes, row.total_bytes)
        table.add_row(
            row.method if row.method != previous else "", row.setting,
            *(_gib(figure) for figure in figures), row.formula, f"[{notes[_note(row)]}]",
            style="bold" if row.method.startswith("memplan") else None,
        )  # fmt: skip
        previous = row.method
    return table


def parameter_lines(model: ModelSpec) -> tuple[str, ...]:
    """The model's parameters in letters, beside what they are."""
    shape = known_shape(model)
    if shape is None or shape.num_experts or len(model.stacks) > 1:
        return ()
    total, h = count_parameters(model).total, shape.hidden_size
    if not shape.gated:
        found = gpt_parameters(
            num_layers=model.num_layers, hidden_size=h, vocab_size=model.vocab_size
        )
        return (_parameters_line("12h²L + Vh", found, total),)
    found = llama_parameters(
        num_layers=model.num_layers, hidden_size=h, intermediate_size=shape.intermediate_size,
        vocab_size=model.vocab_size,
    )  # fmt: skip
    width = (
        f"LLaMA's f is 256·⌈(8h/3)/256⌉ = {llama_feed_forward_size(h):,}, about 8h/3 = "
        f"{8 * h / 3:,.0f}; this model's is {shape.intermediate_size:,}."
    )
    return _parameters_line("L(4h² + 3hf) + Vh", found, total), width


def _parameters_line(letters: str, found: int, total: int) -> str:
    return (
        f"Parameters in letters: {letters} = {found:,}, {found / total:.1%} of the model's {total:,} "
        "(biases, norms, positions, grouped keys and an output matrix of its own are not in it)."
    )


def assumed_bytes_line(setup: TrainingSetup) -> str:
    """How many bytes a parameter takes in this setup, where the methods assume another number."""
    formats = PRECISIONS[setup.chosen_precision]
    parts = {
        "weights": formats.weights.num_bytes,
        "gradients": formats.gradients.num_bytes,
        "master weights": DType.FP32.num_bytes if formats.master_weights else 0,
        "optimizer": _bytes_of_states(setup, formats.optimizer_states),
    }
    total = sum(parts.values())
    if total == sum(num_bytes for _, num_bytes in MIXED_STATES):
        return ""
    words = ", ".join(f"{name} {num_bytes}" for name, num_bytes in parts.items() if num_bytes)
    return (
        f"The methods assume 16 bytes a parameter or more; {setup.chosen_precision.value} with "
        f"{setup.optimizer.value} holds {total}: {words}."
    )


def _bytes_of_states(setup: TrainingSetup, dtype: DType) -> int:
    """The optimizer's states of one element of a large matrix, wherever they are [bytes]."""
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    matrix = Stepped((4096, 4096), dtype, TensorRole.LINEAR, "mlp.up_proj")
    return optimizer_bytes(row, options, matrix) // matrix.numel


def _footnotes(setup: TrainingSetup) -> tuple[str, ...]:
    assumed = assumed_bytes_line(setup)
    units = (
        "GiB = 2^30 bytes. memplan's last figure is the peak of a step: its states and activations "
        "need not all be alive at that moment, and temporaries are."
    )
    return (assumed, units) if assumed else (units,)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:,.2f}"
