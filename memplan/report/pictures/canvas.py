"""Shapes on a canvas, and the canvas as SVG."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from memplan.fast_dataclass import dataclass
from memplan.report.pages.palette import colour_of

FONT = "13px system-ui,sans-serif"
CHARACTER = 7.2
"""Width that a character of the font takes at the most, on average."""
LINE = 18
"""From one line of words to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """A polygon; told by its words where a pointer rests on it."""

    points: tuple[tuple[float, float], ...]
    fill: str
    """A name of the palette; empty: it cannot be seen, and only tells."""
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stroke:
    """A line from point to point."""

    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A mark."""

    x: float
    y: float
    fill: str
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A line of text; ``y`` is where it stands."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    is_bold: bool = False


Shape = Area | Stroke | Dot | Words
DOT = 4.5
"""Radius of a dot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """A drawing."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> Area:
    """A rectangle.

    >>> box(0, 0, 2, 1, "ink").points
    ((0, 0), (2, 0), (2, 1), (0, 1))
    """
    right, bottom = x + width, y + height
    return Area(points=((x, y), (right, y), (right, bottom), (x, bottom)), fill=fill, words=words)


def legend(
    names: Sequence[tuple[str, str]], *, x: float, y: float, width: float
) -> tuple[list[Shape], float]:
    """Swatches with their words, in as many lines as they take; and where they end.

    ``names``: a colour and its words.
    """
    shapes: list[Shape] = []
    at, line = x, y
    for colour, words in names:
        takes = 18 + CHARACTER * len(words) + 16
        if at + takes > x + width and at > x:
            at, line = x, line + LINE
        shapes += [
            box(at, line - 11, 12, 12, colour),
            Words(x=at + 18, y=line, text=words),
        ]
        at += takes
    return shapes, line


def round_ticks(most: float) -> list[float]:
    """Round figures from 0 up to the largest that an axis has room for: four to seven.

    >>> round_ticks(86), round_ticks(0.9)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    if most <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(each for each in (0.2, 0.25, 0.5, 1, 2) if most / (each * unit) < 7) * unit
    return [round(number * step, 9) for number in range(int(most / step) + 1)]


def svg(canvas: Canvas, *, title: str) -> str:
    """The canvas as a drawing of its own, in both colour schemes; ``title`` is for who does not see it."""
    width, height = f"{canvas.width:g}", f"{canvas.height:g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="width:100%;max-width:{width}px;height:auto"><title>{escape(title)}</title>'
        f"<style>{_style(canvas)}</style>"
        f'<rect class="mp-back" width="{width}" height="{height}"/>'
        f"{''.join(_elements(canvas))}</svg>\n"
    )


def _elements(canvas: Canvas) -> Iterator[str]:
    for shape in canvas.shapes:
        match shape:
            case Area():
                name = f"mp-{shape.fill} mp-area" if shape.fill else "mp-none"
                yield _told(f'<path class="{name}" d="{_path(shape.points)}Z"', "path", shape)
            case Dot():
                place = f'cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{DOT}"'
                yield _told(f'<circle class="mp-{shape.fill}" {place}', "circle", shape)
            case Stroke():
                dashed = ' stroke-dasharray="6 4"' if shape.dashed else ""
                yield f'<path class="mp-line-{shape.colour}" d="{_path(shape.points)}"{dashed}/>'
            case Words():
                name = "mp-words mp-bold" if shape.is_bold else "mp-words"
                yield (
                    f'<text class="{name}" x="{shape.x:.1f}" y="{shape.y:.1f}" '
                    f'text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
                )


def _told(start: str, tag: str, shape: Area | Dot) -> str:
    if not shape.words:
        return f"{start}/>"
    return f"{start}><title>{escape(shape.words)}</title></{tag}>"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _style(canvas: Canvas) -> str:
    fills = sorted(
        {each.fill for each in canvas.shapes if isinstance(each, Area | Dot) and each.fill}
    )
    lines = sorted({each.colour for each in canvas.shapes if isinstance(each, Stroke)})
    schemes = []
    for scheme in (0, 1):
        rules = [
            f".mp-{name}{{fill:{colour_of(name, scheme=scheme)}}}" for name in ("back", *fills)
        ]
        rules += [f".mp-line-{name}{{stroke:{colour_of(name, scheme=scheme)}}}" for name in lines]
        back, ink = (colour_of(name, scheme=scheme) for name in ("back", "ink"))
        rules += [f".mp-area{{stroke:{back}}}", f".mp-words{{fill:{ink};stroke:{back}}}"]
        schemes.append("".join(rules))
    usual = (
        f".mp-words{{font:{FONT};stroke-width:3;paint-order:stroke}}.mp-bold{{font-weight:600}}.mp-area{{stroke-width:.8}}"
        ".mp-none{fill:transparent;stroke:none}"
        "[class^=mp-line]{fill:none;stroke-width:1.5}"
    )
    dark = f"@media (prefers-color-scheme:dark){{@media screen{{{schemes[1]}}}}}"
    return usual + schemes[0] + dark
