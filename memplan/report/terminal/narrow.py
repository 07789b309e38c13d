"""rich's tables where there is no room for them: the first column stays, the others wrap into blocks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import replace

if TYPE_CHECKING:
    from rich.table import Column, Table

    from memplan.report.terminal.console import Console

EDGES, DIVIDER = 2, 1
"""Characters of the frame: on both sides together, and between two columns."""
WIDEST_WORD = 20
"""Characters of a text column that longer words are broken into."""


def print_table(console: "Console", table: "Table", *, num_labels: int = 1) -> None:
    """Print a table whole, or in blocks that are no wider than the console.

    ``num_labels``: how many of the first columns stay.
    """
    columns = table.columns
    least = [_least_width(console, column) for column in columns]
    if len(columns) < 2 or _width(table, least) <= console.width:
        console.print(table)
        return
    labels, others = least[:num_labels], least[num_labels:]
    room = console.width - _width(table, [0, *labels[1:], max(others)])
    labels[0] = min(labels[0], max(1, room))
    for block in _packed(console.width, table, labels, others):
        console.print(_part(table, [*range(num_labels), *block]))


def _width(table: "Table", widths: Sequence[int]) -> int:
    padding = table.padding[1] + table.padding[3]
    return EDGES + sum(widths) + (padding + DIVIDER) * (len(widths) - 1)


def _least_width(console: "Console", column: "Column") -> int:
    """What a column needs so that no figure and no usual word is cut."""
    found = 0
    for cell in (column.header, *column.cells):
        measured = console.measure(cell)
        word = min(measured.minimum, WIDEST_WORD)
        found = max(found, measured.maximum if column.no_wrap else word)
    return found


def _packed(
    width: int, table: "Table", labels: Sequence[int], others: Sequence[int]
) -> Iterator[list[int]]:
    """Numbers of the columns of each block, without the labels."""
    block: list[int] = []
    used: list[int] = []
    for number, wanted in enumerate(others, start=len(labels)):
        if block and _width(table, [*labels, *used, wanted]) > width:
            yield block
            block, used = [], []
        block.append(number)
        used.append(wanted)
    yield block


def _part(table: "Table", numbers: Sequence[int]) -> "Table":
    """Some columns of a table, all rows."""
    from rich.table import Table

    part = Table(
        box=table.box, pad_edge=table.pad_edge, padding=table.padding, title=table.title,
        title_justify=table.title_justify, title_style=table.title_style,
    )  # fmt: skip
    chosen = [table.columns[number] for number in numbers]
    part.columns = [
        replace(column.copy(), _index=place, no_wrap=column.no_wrap and place > 0, overflow="fold")
        for place, column in enumerate(chosen)
    ]
    for row, cells in zip(
        table.rows, zip(*(each.cells for each in chosen), strict=True), strict=True
    ):
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part
