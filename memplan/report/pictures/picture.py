"""A picture as a value: its drawing, the table behind it, and the ways to show both."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass, replace
from memplan.report.pages.frame import PAGE, STYLE
from memplan.report.pages.palette import colour_of, variables
from memplan.report.pages.tables import table
from memplan.report.pictures.canvas import DOT, Area, Canvas, Dot, Shape, Stroke, Words, svg

_FIGURE = (
    '<figure class="mp-picture" style="margin:1em 0"><div class="scroll" style="overflow-x:auto" '
    'tabindex="0" role="group" aria-label="{title}"><div style="min-width:{least}px">{drawing}</div></div>'
    "<details><summary>{title}, as a table</summary>{table}</details></figure>\n"
)
LEAST_WIDTH = 640
"""Pixels below which a drawing scrolls instead of shrinking: its words stay to be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A drawing, and what it shows in words and figures."""

    title: str
    words: str
    """What is to be seen, in a sentence."""
    canvas: Canvas
    head: tuple[str, ...]
    """Of the table behind it."""
    rows: tuple[tuple[str, ...], ...]
    chart: tuple[str, ...]
    """The same with characters, line by line."""

    @property
    def svg(self) -> str:
        """The drawing as SVG: one file, both colour schemes, no network."""
        return svg(self.canvas, title=f"{self.title}. {self.words}")

    def _repr_html_(self) -> str:
        """For notebooks and pages: the drawing, and the table for keyboard and screen reader."""
        return _FIGURE.format(
            least=min(LEAST_WIDTH, round(self.canvas.width)),
            drawing=self.svg,
            title=escape(self.title),
            table=table(self.head, self.rows, caption=self.title),
        )

    def __str__(self) -> str:
        return "\n".join((self.title, *self.chart))

    def __repr__(self) -> str:
        return f"Picture({self.title})"

    def save(self, path: str | Path) -> None:
        """Write the drawing to a file that ends in ``.svg``, or a page with its table in ``.html``.

        Raises ``UsageError`` for another ending.
        """
        place = Path(path)
        if place.suffix == ".svg":
            place.write_text(self.svg, encoding="utf-8")
        elif place.suffix in (".html", ".htm"):
            place.write_text(page([self], title=self.title), encoding="utf-8")
        else:
            msg = f"{path}: a picture is saved as .svg or .html; to_figure() makes others with matplotlib"
            raise UsageError(msg)

    def to_figure(self) -> Any:
        """A ``matplotlib.figure.Figure`` of the same drawing.

        Raises ``UsageError`` where matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            msg = "to_figure: matplotlib is not installed: pip install matplotlib, or take svg"
            raise UsageError(msg) from None
        width, height = self.canvas.width, self.canvas.height
        figure = Figure(figsize=(width / 100, height / 100), dpi=100)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        for shape in self.canvas.shapes:
            _draw(axes, shape)
        return figure


def _draw(axes: Any, shape: Shape) -> None:
    """One shape on matplotlib's axes."""
    match shape:
        case Area(fill=""):
            return
        case Area():
            xs, ys = zip(*shape.points, strict=True)
            back = colour_of("back", scheme=0)
            axes.fill(
                xs, ys, facecolor=colour_of(shape.fill, scheme=0), edgecolor=back, linewidth=0.6
            )
        case Stroke():
            xs, ys = zip(*shape.points, strict=True)
            style = "--" if shape.dashed else "-"
            axes.plot(xs, ys, style, color=colour_of(shape.colour, scheme=0), linewidth=1)
        case Dot():
            colour = colour_of(shape.fill, scheme=0)
            axes.plot([shape.x], [shape.y], "o", color=colour, markersize=DOT * 1.6)
        case Words():
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            weight = "bold" if shape.is_bold else "normal"
            axes.text(
                shape.x, shape.y, shape.text, ha=side, va="baseline", fontsize=9, weight=weight
            )


def together(pictures: Sequence[Picture], *, title: str) -> Picture:
    """Pictures one below the other as one."""
    if len(pictures) == 1:
        return pictures[0]
    shapes: list[Shape] = []
    y = 0.0
    for each in pictures:
        shapes.append(Words(x=12, y=y + 20, text=each.title, is_bold=True))
        shapes += (_moved(shape, y + 28) for shape in each.canvas.shapes)
        y += 28 + each.canvas.height
    longest = max((each.head for each in pictures), key=len)
    rows = tuple(
        (each.title, *row, *[""] * (len(longest) - len(row)))
        for each in pictures
        for row in (each.head, *each.rows)
    )
    return Picture(
        title=title,
        words="; ".join(f"{each.title}: {each.words}" for each in pictures),
        canvas=Canvas(
            width=max(each.canvas.width for each in pictures), height=y, shapes=tuple(shapes)
        ),
        head=("picture", *longest),
        rows=rows,
        chart=tuple(line for each in pictures for line in (each.title, *each.chart, "")),
    )


def _moved(shape: Shape, down: float) -> Shape:
    match shape:
        case Area() | Stroke():
            return replace(shape, points=tuple((x, y + down) for x, y in shape.points))
        case Dot() | Words():
            return replace(shape, y=shape.y + down)


def page(
    pictures: Sequence[Picture], *, title: str, lines: Sequence[str] = (), below: str = ""
) -> str:
    """A page of pictures with the words before them: one file that asks the network for nothing."""
    head = f"<header><h1>{escape(title)}</h1>" + "".join(f"<p>{escape(each)}</p>" for each in lines)
    sections = "".join(
        f"<section><h2>{escape(each.title)}</h2>{each._repr_html_()}</section>\n"
        for each in pictures
    )
    style = STYLE.substitute(light=variables(scheme=0), dark=variables(scheme=1))
    return PAGE.substitute(
        title=escape(title), style=style, head=f"{head}</header>", sections=sections + below
    )
