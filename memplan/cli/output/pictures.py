"""``--report`` and ``--chart``: an answer as a page, and as a picture of characters."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.output.terminal import write_file
from memplan.options.table import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.text import Text

    from memplan.estimator import Estimate
    from memplan.report.pictures.picture import Picture

PAGES = (".html", ".htm")
"""Endings of a page."""
DRAWING = ".svg"
"""And of a drawing."""


def check_pictures(values: Values) -> None:
    """Raise ``UsageError`` for a report that is no page, and for pictures among rows for scripts."""
    report = values["report"]
    if values["format"] != "table":
        from memplan.cli.words.unused import refuse

        named = {"--report": report is not None, "--chart": values["chart"]}
        refuse("--format", [name for name, given in named.items() if given])
    if report is not None and Path(report).suffix.lower() not in (*PAGES, DRAWING):
        from memplan.errors import UsageError

        msg = f"--report: {Path(report).name!r} must end in .html (a page) or .svg (the drawing)"
        raise UsageError(msg)


def write_report(
    file: str, *, page: "Callable[[], str]", drawings: "Callable[[], Sequence[Picture]]"
) -> str:
    """Write a page, or the drawing alone, by what the file's name ends in; returns what is to be said of it.

    Raises ``UsageError`` where the answer is several drawings, and ``InputError`` where the file cannot be written.
    """
    if Path(file).suffix.lower() != DRAWING:
        return write_page(page(), file)
    drawn = drawings()
    if len(drawn) != 1:
        from memplan.errors import UsageError

        msg = f"--report: a drawing is one picture, and here are {len(drawn)}: write a report.html"
        raise UsageError(msg)
    return write_page(drawn[0].svg, file)


def write_page(text: str, page: str) -> str:
    """Write a page or a drawing; returns what is to be said of it below the answer.

    It is written before anything is printed: whoever reads no further (``| head -3``) has it all the same.
    """
    write_file(Path(page), text, option="--report")
    return f"Wrote {page}: {len(text.encode()) // 1024} KiB"


def estimate_report(rows: "Sequence[Sequence[Estimate]]") -> str:
    """The page of one setup whole, or of several with the bytes of each."""
    from memplan import __version__

    if len(rows) == 1:
        from memplan.report.html import html_report

        return html_report(rows[0], version=__version__)
    from memplan.report.estimates.answer import needed_text
    from memplan.report.estimates.changes import setup_label
    from memplan.report.pictures.picture import page

    lines = [
        f"{setup_label(each.setup)} on {each.gpu.short_name}: {each.verdict}, needs "
        f"{needed_text(each.total_bytes)} GiB"
        for row in rows
        for each in row
        if each.gpu is not None
    ]
    name = rows[0][0].model.name
    title = f"{name}: {len(rows)} setups"
    return page(
        estimate_pictures(rows), title=title, lines=[*lines, f"Made by memplan {__version__}."]
    )


def estimate_pictures(rows: "Sequence[Sequence[Estimate]]") -> "list[Picture]":
    """Each setup by component and phase, and the ranks of a pipeline."""
    from dataclasses import replace

    from memplan.report.estimates.changes import setup_label
    from memplan.report.pictures.bars import phases_picture, ranks_picture

    if len(rows) == 1:
        found = rows[0][0]
        ranks = [] if found.setup.pipeline is None else [ranks_picture(found)]
        return [phases_picture(found), *ranks]
    most = max(row[0].peak_bytes for row in rows)
    return [
        replace(phases_picture(row[0], reaching_bytes=most), title=setup_label(row[0].setup))
        for row in rows
    ]


def sweep_report(pictures: "Sequence[Picture]", model: str) -> str:
    """The page of a sweep."""
    from memplan import __version__
    from memplan.report.pictures.picture import page

    lines = [f"{each.title}: {each.words}" for each in pictures]
    return page(
        pictures, title=f"{model}: a sweep", lines=[*lines, f"Made by memplan {__version__}."]
    )


def print_charts(pictures: "Sequence[Picture]") -> None:
    """Print pictures with characters, components in their colours where there are any."""
    from rich.text import Text

    from memplan.report.terminal.console import TerminalConsole

    console = TerminalConsole()
    for each in pictures:
        console.print()
        console.print(Text(each.title, style="bold"))
        for line in each.chart:
            console.print(_coloured(line), soft_wrap=True)


def _coloured(line: str) -> "Text":
    """A line of a chart, each component's character in its colour."""
    from rich.text import Text

    from memplan.memory.account import ComponentKind
    from memplan.report.pages.palette import colour_of
    from memplan.report.pictures.bars import CHART_FILLS

    scheme = int(not _is_light())
    text = Text(line)
    for kind, fill in zip(ComponentKind, CHART_FILLS, strict=True):
        if fill * 2 in line or line.startswith(f"{fill} ") or f"  {fill} " in line:
            text.highlight_words([fill], style=colour_of(kind.label, scheme=scheme))
    return text


def _is_light() -> bool:
    """Whether the terminal says that it is light, as rxvt, Konsole and others do."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
