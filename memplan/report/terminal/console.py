"""The terminal as reports see it: no text out of a file reaches it as an order.

What most commands print is lines of text with a few colours, and to import rich takes longer than to find what they
say. So lines are written here as rich writes them; what is drawn with rich's own tables and trees is handed to it,
as is everything on Windows.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from memplan.text import printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.text import Text as RichText

DEFAULT_COLUMNS = 80
"""Of what is no terminal, or one that does not say."""
_CODES = {
    name: code
    for first, names in ((1, ("bold", "dim", "italic", "underline")),
                         (30, ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")))
    for code, name in enumerate(names, start=first)
}  # fmt: skip
"""ECMA-48, "Select graphic rendition": what this terminal is told for a word of a style."""
_FIRST_COLOUR = 30


class Console(Protocol):
    """What reports print on: this terminal, or a console of rich's own."""

    @property
    def width(self) -> int:
        """Columns."""

    def print(
        self, *objects: Any, markup: bool | None = None, soft_wrap: bool | None = None
    ) -> None:
        """Print lines of text, or what rich draws; ``soft_wrap``: as long as they are."""

    def measure(self, drawn: Any) -> Any:
        """How narrow and how wide what rich draws can be."""


class Text:
    """A piece of text, parts of it in a style: words of ``bold dim italic underline`` and a colour.

    >>> line = Text("a100")
    >>> line.append("  fits", style="green")
    >>> line.plain
    'a100  fits'
    """

    __slots__ = ("no_wrap", "plain", "spans", "style")

    def __init__(self, plain: str = "", *, style: str = "", no_wrap: bool = False) -> None:
        self.plain = plain
        self.style = style
        self.no_wrap = no_wrap
        self.spans: list[tuple[int, int, str]] = []
        """Where each begins and ends, and its style; a later one counts above an earlier one."""

    @classmethod
    def assemble(cls, *parts: str | tuple[str, str]) -> "Text":
        """One text of several, each alone or with its style."""
        made = cls()
        for part in parts:
            made.append(*((part,) if isinstance(part, str) else part))
        return made

    def append(self, text: str, style: str = "") -> None:
        """Add to its end."""
        start = len(self.plain)
        self.plain += text
        self.stylize(style, start)

    def stylize(self, style: str, start: int = 0, end: int | None = None) -> None:
        """Give a part a style."""
        end = len(self.plain) if end is None else end
        if style and start < end:
            self.spans.append((start, end, style))

    def __str__(self) -> str:
        return self.plain

    def rstrip(self) -> None:
        """Leave blanks at its end away."""
        self.plain = self.plain.rstrip()

    @property
    def is_simple(self) -> bool:
        """Whether it can be sent as it is, in styles of the words that are known here."""
        if "\t" in self.plain or printable(self.plain) != self.plain:
            return False
        styles = (self.style, *(style for _, _, style in self.spans))
        return all(word in _CODES for style in styles for word in style.split())

    def pieces(self, start: int, end: int) -> Iterator[tuple[str, str]]:
        """A part of it, cut where styles change, each piece with the styles that it has."""
        edges = {start, end}
        for first, last, _ in self.spans:
            edges |= {each for each in (first, last) if start < each < end}
        cuts = sorted(edges)
        for left, right in pairwise(cuts):
            styles = [style for first, last, style in self.spans if first <= left and right <= last]
            yield self.plain[left:right], " ".join(filter(None, (self.style, *styles)))

    def __rich__(self) -> "RichText":
        """The same as rich has it."""
        from rich.text import Text as RichText  # where a console of its own shows it

        made = RichText(self.plain, style=self.style, no_wrap=self.no_wrap or None)
        for start, end, style in self.spans:
            made.stylize(style, start, end)
        return made


class TerminalConsole:
    """A console that writes control characters out instead of sending them.

    Colours and cursor movements of its own are not text, and stay.
    """

    def __init__(self) -> None:
        self._rich: RichConsole | None = None

    @property
    def width(self) -> int:
        """Columns: ``COLUMNS``, or what the terminal says."""
        columns, lines = os.environ.get("COLUMNS", ""), os.environ.get("LINES", "")
        is_dumb = _is_dumb(sys.stdout)
        if columns.isdigit() and (lines.isdigit() or not is_dumb):
            return int(columns)
        if is_dumb:
            return DEFAULT_COLUMNS
        for descriptor in (0, 1, 2):
            with suppress(AttributeError, ValueError, OSError):
                return os.get_terminal_size(descriptor).columns or DEFAULT_COLUMNS
        return DEFAULT_COLUMNS

    def measure(self, drawn: Any) -> Any:
        """How narrow and how wide what rich draws can be."""
        return self._on_rich().measure(drawn)

    def print(
        self, *objects: Any, markup: bool | None = None, soft_wrap: bool | None = None
    ) -> None:
        """Print lines of text, or what rich draws; ``soft_wrap``: as long as they are."""
        is_marked = markup is not False and any(
            "[" in each for each in objects if isinstance(each, str)
        )
        if os.name == "nt" or is_marked or not all(_is_text(each) for each in objects):
            self._on_rich().print(*objects, markup=markup, soft_wrap=soft_wrap)
            return
        texts = [each if isinstance(each, Text) else Text(each) for each in objects] or [Text()]
        width = None if soft_wrap else self.width
        codes = _codes(sys.stdout)
        for text in texts:
            sys.stdout.write("".join(_drawn(text, width, codes)))
        sys.stdout.flush()

    def _on_rich(self) -> "RichConsole":
        if self._rich is None:
            from memplan.report.terminal.rich_console import (
                PrintableConsole,  # which most do without
            )

            self._rich = PrintableConsole()
        return self._rich


def _is_text(value: object) -> bool:
    text = Text(value) if isinstance(value, str) else value
    return isinstance(text, Text) and text.is_simple


def _drawn(text: Text, width: int | None, codes: "dict[str, int]") -> Iterator[str]:
    """Its lines as the terminal is sent them."""
    for start, end in _lines(text, width):
        for piece, style in text.pieces(start, end):
            told = _sequence(style, codes)
            yield f"\x1b[{told}m{piece}\x1b[0m" if told and piece else piece
        yield "\n"


def _sequence(style: str, codes: "dict[str, int]") -> str:
    """A style as the terminal is told it: of several colours the last."""
    found = {codes[word] for word in style.split() if word in codes}
    colours = [codes[word] for word in style.split() if codes.get(word, 0) >= _FIRST_COLOUR]
    told = sorted(each for each in found if each < _FIRST_COLOUR) + colours[-1:]
    return ";".join(map(str, told))


def _lines(text: Text, width: int | None) -> Iterator[tuple[int, int]]:
    """Where each line of it begins and ends, no longer than the terminal is wide; None: as long as they are."""
    start = 0
    for line in text.plain.split("\n"):
        if width is None or text.no_wrap:
            yield start, start + len(line.rstrip(" "))
        else:
            yield from ((start + first, start + last) for first, last in wrapped(line, width))
        start += len(line) + 1


def wrapped(line: str, width: int) -> list[tuple[int, int]]:
    """Where each part of a line begins and ends that is cut between words; longer words are cut themselves.

    There are no blanks at the end of a line.

    >>> wrapped("needs 17 of 31 GiB", 8)
    [(0, 8), (9, 14), (15, 18)]
    """
    found: list[tuple[int, int]] = []
    start = used = 0
    for first, last, word in _words(line):
        own = columns_of(word.rstrip())
        if used and used + own > width:
            found.append((start, first))
            start, used = first, 0
        if own > width:
            while columns_of(line[start:last]) > width:
                cut = start + _most_of(line[start:last], width)
                found.append((start, cut))
                start = cut
            used = columns_of(line[start:last])
        else:
            used += columns_of(word)
    found.append((start, len(line)))
    return [(begin, begin + len(line[begin:end].rstrip(" "))) for begin, end in found]


def _words(line: str) -> Iterator[tuple[int, int, str]]:
    """Each word with the blanks after it, the first with those before it."""
    import re  # short lines get no further

    for found in re.finditer(r"\s*\S+\s*", line):
        yield found.start(), found.end(), found[0]


def _most_of(word: str, width: int) -> int:
    """How many characters of a word have room."""
    used = 0
    for number, character in enumerate(word):
        used += columns_of(character)
        if used > width:
            return max(1, number)
    return len(word)


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: East Asian characters take two, and marks on others none.

    >>> columns_of("GPU"), columns_of("模型")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width  # most texts get no further

    return sum(
        0 if category(each) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(each) in "WF")
        for each in text
    )


def _is_terminal(stream: TextIO) -> bool:
    """Whether it takes colours: by what it is, or what the environment says of it."""
    told = {"0": False, "1": True}.get(os.environ.get("TTY_COMPATIBLE", ""))
    if told is not None:
        return told
    forced = os.environ.get("FORCE_COLOR")
    if forced is not None:
        return forced != ""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _is_dumb(stream: TextIO) -> bool:
    return _is_terminal(stream) and os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def _codes(stream: TextIO) -> "dict[str, int]":
    """What is sent for styles: nothing where it is no terminal, no colours where nobody wants them."""
    if not _is_terminal(stream) or _is_dumb(stream):
        return {}
    if os.environ.get("NO_COLOR"):
        return {word: code for word, code in _CODES.items() if code < _FIRST_COLOUR}
    return _CODES
