"""Tables that lose nothing where it is narrow: the first columns stay, the others wrap into blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass, replace

if TYPE_CHECKING:
    from memplan.report.terminal.console import Text

MARGIN = 1
"""Spaces before a line."""
GAP = 2
"""Spaces between columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: what stands over it, and in it."""

    header: tuple[str, ...]
    """Lines."""
    cells: tuple[str, ...]
    """A cell may have several lines."""
    styles: tuple[str, ...] = ()
    """Of each cell, as rich names them; empty: none."""
    is_figure: bool = False
    """Whether it is set to the right."""
    gives_way: int = 0
    """Where there is no room for all, those with the highest go first; 0: it stays."""

    @property
    def name(self) -> str:
        """The header in a line."""
        return " ".join(filter(None, self.header)).replace("- ", "")

    @property
    def width(self) -> int:
        """Characters of the longest line."""
        lines = (*self.header, *(line for cell in self.cells for line in cell.split("\n")))
        return max(map(len, lines), default=0)

    def style(self, row: int) -> str:
        """Of a row's cell."""
        return self.styles[row] if self.styles else ""


def print_blocks(
    width: int,
    label: Column,
    others: Sequence[Column],
    *,
    before: Sequence[Column] = (),
    above: Mapping[int, str] | None = None,
) -> Iterator["Text"]:
    """Lines of as many blocks as it takes, each with the labels and no wider than ``width``.

    ``before`` stands left of the label, in every block. Labels are folded at spaces where that saves
    a block. ``above``: what heads the rows from this one on; where it is empty, a blank line.
    Columns that give way are left out before there is a second block, and named below.
    """
    fixed = sum(column.width + GAP for column in before)
    room = width - fixed - MARGIN - GAP - min(label.width, max(LEAST_LABEL, longest_word(label)))
    others = [each if each.is_figure else _no_wider(each, room) for each in others]
    others, left_out = with_room(width - fixed, label, others)
    folded = _folded(label, _label_width(width - fixed, label, others))
    for number, block in enumerate(packed(width, fixed + folded.width, others)):
        if number:
            yield _line([])
        yield from _block_lines([*before, folded, *block], above or {}, width)
    if left_out:
        names = ", ".join(column.name for column in left_out)
        for line in hanging(f"{' ' * MARGIN}Not shown, for want of room: {names}", width):
            yield _line_of(line)


def with_room(
    width: int, label: Column, others: Sequence[Column]
) -> tuple[Sequence[Column], Sequence[Column]]:
    """The columns for which there is room in one block, and those that gave way.

    >>> columns = [Column(header=("x" * 10,), cells=(), gives_way=number) for number in (0, 2, 1)]
    >>> label = Column(header=("y" * 10,), cells=())
    >>> kept, left_out = with_room(40, label, columns)
    >>> [each.gives_way for each in kept], [each.gives_way for each in left_out]
    ([0, 1], [2])
    """
    kept, left_out = list(others), set()
    for column in sorted(others, key=lambda each: -each.gives_way):
        if not column.gives_way or _is_whole(width, label, kept):
            break
        kept = [each for each in kept if each is not column]
        left_out.add(id(column))
    return kept, [each for each in others if id(each) in left_out]


def _is_whole(width: int, label: Column, others: Sequence[Column]) -> bool:
    """Whether all stand in one block, and no word of the label is broken for it."""
    folded = _folded(label, _label_width(width, label, others))
    return folded.width >= longest_word(label) and len(packed(width, folded.width, others)) == 1


def has_room(width: int, before: Sequence[Column], label: Column, others: Sequence[Column]) -> bool:
    """Whether each of the others fits beside the first columns, the label folded."""
    least = min(label.width, max(LEAST_LABEL, longest_word(label)))
    fixed = sum(column.width + GAP for column in before) + least
    return MARGIN + fixed + GAP + max((column.width for column in others), default=0) <= width


def packed(width: int, label_width: int, others: Sequence[Column]) -> list[list[Column]]:
    """The other columns in blocks, as many in each as there is room for.

    >>> columns = [Column(header=("x" * 10,), cells=()) for _ in range(3)]
    >>> [len(block) for block in packed(40, 10, columns)]
    [2, 1]
    """
    blocks: list[list[Column]] = [[]]
    used = MARGIN + label_width
    for column in others:
        if blocks[-1] and used + GAP + column.width > width:
            blocks.append([])
            used = MARGIN + label_width
        blocks[-1].append(column)
        used += GAP + column.width
    return blocks


LEAST_LABEL = 12
"""Characters to which labels may be folded."""
EASY_LABEL = 20
"""The same where there is room for more."""
NARROW = 60
"""Terminals below this width are narrow."""


def _label_width(width: int, label: Column, others: Sequence[Column]) -> int:
    """The widest that makes the fewest blocks."""
    widest = max((column.width for column in others), default=0)
    longest = max(1, min(label.width, width - MARGIN - GAP - widest))
    least = min(longest, max(EASY_LABEL if width >= NARROW else LEAST_LABEL, longest_word(label)))
    return min(range(longest, least - 1, -1), key=lambda each: len(packed(width, each, others)))


def longest_word(column: Column) -> int:
    """Characters that cannot be folded."""
    return max((len(word) for cell in column.cells for word in cell.split()), default=0)


def _no_wider(column: Column, room: int) -> Column:
    """A column of words, folded where one line of it has no room beside the label."""
    if column.width <= room or longest_word(column) > room:
        return column
    return _folded(column, room)


def _folded(column: Column, width: int) -> Column:
    from textwrap import wrap

    cells = (
        "\n".join(
            part
            for line in cell.split("\n")
            for part in wrap(line, width, break_on_hyphens=False) or [""]
        )
        for cell in column.cells
    )
    return replace(column, cells=tuple(cells))


def hanging(text: str, width: int) -> list[str]:
    """The lines of a text, those that continue it further in.

    >>> hanging("  8 GPUs, ZeRO-1: 63.3 GiB more", 20)
    ['  8 GPUs, ZeRO-1:', '    63.3 GiB more']
    """
    from textwrap import wrap

    indent = " " * (len(text) - len(text.lstrip()))
    return wrap(
        text.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


def _block_lines(
    columns: Sequence[Column], above: Mapping[int, str], width: int
) -> Iterator["Text"]:
    widths = [column.width for column in columns]
    num_header = max(len(column.header) for column in columns)
    for number in range(num_header):
        parts = [
            (_padded(_header_line(column, number, num_header), column, width), "bold")
            for column, width in zip(columns, widths, strict=True)
        ]
        yield _line(parts)
    yield _line([("─" * (sum(widths) + GAP * (len(columns) - 1)), "")])
    for row in range(len(columns[0].cells)):
        if row in above:
            yield from _section_lines(above[row], width, is_first=not row)
        cells = [column.cells[row].split("\n") for column in columns]
        for number in range(max(map(len, cells))):
            parts = [
                (
                    _padded(cell[number] if number < len(cell) else "", column, width),
                    column.style(row),
                )
                for cell, column, width in zip(cells, columns, widths, strict=True)
            ]
            yield _line(parts)


def _section_lines(text: str, width: int, *, is_first: bool) -> Iterator["Text"]:
    """A blank line between sections, and the one's own words."""
    from textwrap import wrap

    if not is_first:
        yield _line([])
    for line in wrap(text, width - MARGIN, break_on_hyphens=False):
        yield _line([(line, "bold")])


def _header_line(column: Column, number: int, num_header: int) -> str:
    """Headers stand on the ground, like their columns."""
    missing = num_header - len(column.header)
    return column.header[number - missing] if number >= missing else ""


def _padded(text: str, column: Column, width: int) -> str:
    return text.rjust(width) if column.is_figure else text.ljust(width)


def _line_of(text: str) -> "Text":
    from memplan.report.terminal.console import Text

    return Text(text, style="dim")


def _line(parts: Iterable[tuple[str, str]]) -> "Text":
    from memplan.report.terminal.console import Text

    line = Text(no_wrap=True)
    for number, (text, style) in enumerate(parts):
        line.append(" " * (GAP if number else MARGIN))
        line.append(text, style=style)
    line.rstrip()
    return line
