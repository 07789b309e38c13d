"""Every distinct rank of a job as people and scripts read it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.fast_dataclass import replace
from memplan.memory.account import RankAccount
from memplan.report.estimates.answer import print_answer
from memplan.report.estimates.assumed import print_assumed
from memplan.report.estimates.changes import setup_label
from memplan.report.estimates.columns import kernel_groups, plain_gib
from memplan.report.terminal.narrow import print_table

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

MAX_LINES = 20
"""Distinct ranks that a table shows of each setup; JSON and CSV have them all."""
MARKDOWN_COLUMNS = (
    "engine", "zero_stage", "offload_optimizer", "num_gpus", "gpu", "ranks", "num_ranks",
    "peak_bytes", "peak_phase", "held_bytes", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""


def rank_rows(answers: Sequence[Estimate]) -> Iterator[dict[str, object]]:
    """A row for each distinct rank of each estimate, the fullest first.

    It is the row of ``Estimate.to_dict`` for that rank, and ``ranks``: which they are, and
    ``num_ranks``: how many.
    """
    for answer in answers:
        for account in answer.ranks:
            row = replace(answer, account=account).to_dict()
            yield {**row, "ranks": ranks_text(account), "num_ranks": account.num_ranks}


def print_ranks(console: "Console", rows: Sequence[Sequence[Estimate]]) -> None:
    """Print a table with a line for each distinct rank of each setup, the fullest first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    print_answer(console, rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("setup", overflow="fold")
    table.add_column("ranks", overflow="fold")
    for name in ("number", "GiB\nper GPU", "peak in", "between\nsteps", "CPU GiB\nper rank"):
        table.add_column(name, justify="left" if name == "peak in" else "right", no_wrap=True)
    for row in rows:
        groups = kernel_groups(row)
        for answer in (group[0] for group in groups):
            kernel = f", {answer.attention_kernel}" if len(groups) > 1 else ""
            _add_ranks(table, answer, setup_label(answer.setup) + kernel)
    print_table(console, table)
    print_assumed(console, rows)
    console.print(
        Text(
            "GiB = 2^30 bytes, allocated by PyTorch in a training step. Ranks that hold the same share a line. "
            "The first one writes checkpoints for all.",
            style="dim",
        )
    )


def _add_ranks(table: "Table", answer: Estimate, label: str) -> None:
    """A line for each distinct rank of one setup; the label stands on the first."""
    accounts = answer.ranks
    for account in accounts[:MAX_LINES]:
        host = account.host.peak_bytes
        table.add_row(
            label,
            ranks_text(account),
            str(account.num_ranks),
            plain_gib(account.peak.peak_bytes),
            account.peak.name,
            plain_gib(account.held_bytes),
            plain_gib(host) if host else "-",
        )
        label = ""
    if rest := accounts[MAX_LINES:]:
        count = sum(account.num_ranks for account in rest)
        table.add_row("", f"{len(rest)} more kinds, none fuller", str(count))


def ranks_text(account: RankAccount) -> str:
    """The ranks that an account is of.

    >>> ranks_text(RankAccount(phases=(), held_bytes=0, ranks=(range(1), range(4, 8))))
    '0, 4-7'
    """
    return ", ".join(
        str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in account.ranks
    )
