"""Rich's console, with no text out of a file as an order: where tables and trees of rich's own are drawn."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from memplan.text import printable


class PrintableConsole(Console):
    """A console that writes control characters out instead of sending them.

    Rich's own colours and cursor movements are not text, and stay.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(highlight=False, stderr=stderr)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render as rich does, every text printable, and no blanks at the end of a line."""
        line: list[Segment] = []
        for segment in super().render(renderable, options):
            if segment.control:
                line.append(segment)
                continue
            first, *others = printable(segment.text).split("\n")
            line.append(Segment(first, segment.style))
            for text in others:
                yield from _without_blanks(line)
                yield Segment("\n", segment.style)
                line = [Segment(text, segment.style)]
        # Rich takes an empty piece behind the last line for one line more.
        yield from (each for each in line if each.text or each.control)


def _without_blanks(line: list[Segment]) -> list[Segment]:
    """A line without the blanks that fill a table up to its width."""
    kept = list(line)
    while kept and not kept[-1].control and not kept[-1].text.strip(" "):
        kept.pop()
    if kept and not kept[-1].control:
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    return kept
