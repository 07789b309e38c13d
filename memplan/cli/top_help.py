"""``memplan --help``, written without Typer, whose import takes twice as long as all else of it.

``tests/cli/test_plain.py`` holds it against the page that Typer writes of the same rows.
"""

from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import wrap

from memplan.cli.commands import ABOUT, COMMANDS, MOST_COLUMNS, TOP_OPTIONS

WIDEST_NAME = 26
"""Columns up to which a name stands beside its words, not above them."""
_LEAST_COLUMNS, _LEAST_WORDS = 50, 10
"""Of a page and of words beside a name, however narrow the terminal is."""


def page() -> str:
    """The page, as wide as the terminal."""
    columns = max(min(get_terminal_size().columns, MOST_COLUMNS) - 2, _LEAST_COLUMNS)
    about = wrap(ABOUT, columns, initial_indent="  ", subsequent_indent="  ")
    options = {**TOP_OPTIONS, "-h, --help": "Show this message and exit."}
    column = max(map(len, options))
    return "\n".join(
        [
            "Usage: memplan [OPTIONS] COMMAND [ARGS]...", "", *about, "", "Options:",
            *rows(options.items(), columns - 2, widest=column, hyphens=True), "", "Commands:",
            *rows(COMMANDS.items(), columns - 2),
        ]
    )  # fmt: skip


def rows(
    named: Iterable[tuple[str, str]],
    columns: int,
    *,
    least: int = 0,
    widest: int = WIDEST_NAME,
    hyphens: bool = False,
) -> list[str]:
    """Names and what each is about side by side; a line ends within a word at ``hyphens`` alone."""
    named = list(named)
    column = max(least, *(min(len(name), widest) for name, _ in named)) + 2
    room = max(columns - column, _LEAST_WORDS)
    found = []
    for name, text in named:
        lines = wrap(text, room, break_on_hyphens=hyphens) or [""]
        if len(name) > widest:
            found.append(f"  {name}")
        else:
            found.append(f"  {name.ljust(column)}{lines.pop(0)}".rstrip())
        found += [f"  {' ' * column}{line}" for line in lines]
    return found
