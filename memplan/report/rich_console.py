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
        """Render as rich does, every text printable."""
        for segment in super().render(renderable, options):
            text = printable(segment.text)
            same = segment.control or text == segment.text
            yield segment if same else Segment(text, segment.style)
