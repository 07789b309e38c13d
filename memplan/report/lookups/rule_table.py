"""One table as articles lay it out: ZeRO's stages down, checkpointing across, states and activations summed.

For a parameter count and a layer's sizes that are only given: no model is read.
"""

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.formulas.activations import layer_activation_bytes
from memplan.formulas.states import MAX_STAGE, zero_state_bytes, zero_state_equation
from memplan.report.rows.written import rows_csv, rows_json, rows_markdown
from memplan.report.terminal.narrow import print_table
from memplan.units import GB, GIB, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

RULE_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleCase:
    """What the table is asked about."""

    num_params: int
    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    batch_size: int
    """Sequences of one GPU."""
    num_gpus: int
    precision: int = 2
    """Bytes of a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleRow:
    """One stage, with and without checkpointing [bytes of one GPU]."""

    zero_stage: int
    equation: str
    states_bytes: int
    activations_bytes: int
    checkpointed_bytes: int
    """Activations where each layer keeps its input, and one layer is whole at a time."""

    @property
    def total_bytes(self) -> int:
        """Without checkpointing."""
        return self.states_bytes + self.activations_bytes

    @property
    def checkpointed_total_bytes(self) -> int:
        """With it."""
        return self.states_bytes + self.checkpointed_bytes


def rule_rows(case: RuleCase) -> tuple[RuleRow, ...]:
    """All four stages.

    States as arXiv:1910.02054, figure 1; a layer's activations as arXiv:2205.05198, equation 2, with p bytes a
    number; with checkpointing its input ``psbh`` for each layer, and one layer in full while it runs again (the
    same paper, section 5).

    >>> case = RuleCase(
    ...     num_params=10**10, hidden_size=4096, num_layers=48, num_heads=32, seq_len=512, batch_size=8, num_gpus=64
    ... )
    >>> [round(row.total_bytes / 1e9, 1) for row in rule_rows(case)]
    [203.5, 85.4, 65.7, 46.0]
    """
    layer = layer_activation_bytes(
        case.hidden_size, num_heads=case.num_heads, seq_len=case.seq_len,
        batch_size=case.batch_size, precision=case.precision,
    )  # fmt: skip
    inputs = case.precision * case.seq_len * case.batch_size * case.hidden_size
    return tuple(
        RuleRow(
            zero_stage=stage,
            equation=zero_state_equation(stage=stage, precision=case.precision),
            states_bytes=int(
                zero_state_bytes(
                    case.num_params, num_gpus=case.num_gpus, stage=stage, precision=case.precision
                )
            ),
            activations_bytes=case.num_layers * layer,
            checkpointed_bytes=case.num_layers * inputs + layer,
        )
        for stage in range(MAX_STAGE + 1)
    )


def case_words(case: RuleCase) -> str:
    """What the table is asked about, in letters and numbers."""
    return (
        f"Φ = {case.num_params:,} parameters, L = {case.num_layers} layers, h = {case.hidden_size}, "
        f"a = {case.num_heads} heads, s = {case.seq_len:,} tokens, b = {case.batch_size} sequences a GPU, "
        f"n = {case.num_gpus} GPUs, p = {case.precision} bytes"
    )


def print_rule_table(console: "Console", case: RuleCase) -> None:
    """Print the table, in GB of 10^9 bytes as articles have it, and what it leaves out."""
    from rich.text import Text

    rows = rule_rows(case)
    head = f"{format_count(case.num_params)} parameters, by rule and textbook"
    console.print(Text(head, style="bold"))
    console.print(Text(case_words(case), style="dim"))
    print_table(console, _table(rows))
    for line in FOOTNOTES:
        console.print(Text(line, style="dim"))


_BY = (
    "GB = 10^9 bytes of one GPU; in parentheses GiB = 2^30. Activations: L·psbh(16 + 2/p + 2as/h + as/(ph)), "
    "arXiv:2205.05198, equation 2; checkpointed L·psbh and one whole layer. States: arXiv:1910.02054, figure 1."
)
_LEFT_OUT = (
    "Left out: logits, temporaries, buffers, gathered parameters, kernels that keep less: with a MODEL, memplan "
    "estimate counts them."
)
FOOTNOTES = (_BY, _LEFT_OUT)


def _table(rows: tuple[RuleRow, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("states", justify="right", no_wrap=True)
    table.add_column("no checkpointing", justify="right", no_wrap=True)
    table.add_column("checkpointing", justify="right", no_wrap=True)
    table.add_column("states by", no_wrap=True)
    for row in rows:
        table.add_row(
            f"ZeRO-{row.zero_stage}",
            *(
                _size(each)
                for each in (row.states_bytes, row.total_bytes, row.checkpointed_total_bytes)
            ),
            row.equation,
        )
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:,.2f} ({num_bytes / GIB:,.2f})"


def write_rule_table(case: RuleCase, output_format: str) -> str:
    """Rows as JSON, CSV or Markdown: one for each stage and each of the two."""
    rows: list[dict[str, object]] = [
        {
            "zero_stage": row.zero_stage,
            "checkpointing": name,
            "states_bytes": row.states_bytes,
            "activations_bytes": kept,
            "total_bytes": row.states_bytes + kept,
            "formula": row.equation,
        }
        for row in rule_rows(case)
        for name, kept in (("none", row.activations_bytes), ("full", row.checkpointed_bytes))
    ]
    if output_format == "json":
        return rows_json(rows, schema_version=RULE_SCHEMA_VERSION, assumptions=[case_words(case)])
    return rows_csv(rows) if output_format == "csv" else rows_markdown(rows)
