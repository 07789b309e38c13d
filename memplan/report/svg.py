"""The timeline as SVG: alone with its own words, or bare for a page that writes them itself."""

from html import escape
from string import Template

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import Lifetime
from memplan.report.palette import DARK, LIGHT
from memplan.report.timeline import (
    LIFETIME_WORDS,
    Moment,
    added_words,
    columns_of,
    step_moments,
    stretched,
)
from memplan.units import GIB

WIDTH, HEIGHT = 960, 320
MAX_COLUMNS = 240
_COLOURED = Template("""
.long{fill:$long}.medium{fill:$medium}.short{fill:$short}.added{fill:$added}
.reserved{stroke:$ink}.line{stroke:$red}.words{fill:$ink;stroke:$back}.back{fill:$back}""")
_LINES = """
.reserved{stroke-width:1.5;fill:none;vector-effect:non-scaling-stroke}
.line{stroke-width:1.5;stroke-dasharray:6 4;fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:#8884;stroke-width:1;vector-effect:non-scaling-stroke}
.words{font:13px system-ui,sans-serif;stroke-width:3;paint-order:stroke}
"""
STYLE = (
    f"{_LINES}{_COLOURED.substitute(LIGHT)}\n"
    f"@media (prefers-color-scheme:dark){{@media screen{{{_COLOURED.substitute(DARK)}}}}}\n"
)
"""Colours as they are, not as properties, which not every viewer of drawings knows."""

RESERVED_WORDS = "reserved by the allocator"


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step laid out on a canvas of one unit each way."""

    columns: tuple[Moment, ...]
    peak: Moment
    capacity_bytes: int
    """0 where it is beyond the drawing, or there is no GPU."""
    added_bytes: int
    """CUDA context and NCCL at the most, above what is reserved; 0 where that is not known."""
    top_bytes: int

    @property
    def peak_position(self) -> float:
        """From 0 on the left to 1."""
        index = next(each for each, moment in enumerate(self.columns) if moment is self.peak)
        return (index + 0.5) / len(self.columns)

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Each phase's name, where it begins and how wide it is."""
        names = dict.fromkeys(moment.phase for moment in self.columns)
        found, start = [], 0
        for name in names:
            count = sum(moment.phase == name for moment in self.columns)
            found.append((name, start / len(self.columns), count / len(self.columns)))
            start += count
        return found


def lay_out(found: Estimate) -> Timeline:
    """The moments of a step, at most ``MAX_COLUMNS`` of them, and the scale."""
    columns = tuple(stretched(columns_of(step_moments(found), MAX_COLUMNS), MAX_COLUMNS))
    peak = max(columns, key=lambda moment: moment.total_bytes)
    capacity = found.gpu.capacity_bytes if found.gpu is not None else 0
    if capacity > 2.5 * peak.total_bytes:
        capacity = 0
    reserved = max(moment.reserved_bytes for moment in columns)
    added = found.overhead_bytes.high if reserved else 0
    top = int(1.08 * max(peak.total_bytes, capacity, reserved + added))
    return Timeline(columns, peak, capacity, added, top)


def shapes(timeline: Timeline, *, width: float, height: float) -> str:
    """The stacked areas, grid lines and the GPU's memory as SVG elements."""
    parts = []
    for share in (0.25, 0.5, 0.75):
        y = height * (1 - share)
        parts.append(f'<line class="grid" x1="0" y1="{y:g}" x2="{width:g}" y2="{y:g}"/>')
    below = [0] * len(timeline.columns)
    for lifetime in Lifetime:
        above = [
            bottom + _share(moment, lifetime)
            for bottom, moment in zip(below, timeline.columns, strict=True)
        ]
        path = _area(below, above, timeline.top_bytes, width, height)
        parts.append(f'<path class="{lifetime.value}" d="{path}"/>')
        below = above
    # Of what comes last it may not be known: a checkpoint is written between steps.
    reserved = [size for moment in timeline.columns if (size := moment.reserved_bytes)]
    if reserved:
        known = width * len(reserved) / len(timeline.columns)
        above = [size + timeline.added_bytes for size in reserved]
        path = _area(reserved, above, timeline.top_bytes, known, height)
        parts.append(f'<path class="added" d="{path}"/>')
        path = _edge(reserved, timeline.top_bytes, known, height)
        parts.append(f'<path class="reserved" d="{path}"/>')
    if timeline.capacity_bytes:
        y = height * (1 - timeline.capacity_bytes / timeline.top_bytes)
        parts.append(f'<line class="line" x1="0" y1="{y:.1f}" x2="{width:g}" y2="{y:.1f}"/>')
    return "".join(parts)


def _share(moment: Moment, lifetime: Lifetime) -> int:
    match lifetime:
        case Lifetime.LONG:
            return moment.long_bytes
        case Lifetime.MEDIUM:
            return moment.medium_bytes
        case Lifetime.SHORT:
            return moment.short_bytes


def _area(below: list[int], above: list[int], top: int, width: float, height: float) -> str:
    """Steps along the upper edge, and back along the lower one."""
    step = width / len(above)
    back = [
        f"V{height * (1 - below[index] / top):.1f}H{index * step:.1f}"
        for index in range(len(below) - 1, -1, -1)
    ]
    start = f"M0 {height * (1 - below[0] / top):.1f}"
    return start + "".join(_steps(above, top, width, height)) + "".join(back) + "Z"


def _steps(sizes: list[int], top: int, width: float, height: float) -> list[str]:
    """From each size to the next, at right angles."""
    step = width / len(sizes)
    return [
        f"H{(index + 1) * step:.1f}" if index and size == sizes[index - 1]
        else f"V{height * (1 - size / top):.1f}H{(index + 1) * step:.1f}"
        for index, size in enumerate(sizes)
    ]  # fmt: skip


def _edge(sizes: list[int], top: int, width: float, height: float) -> str:
    """A line at these heights."""
    start = f"M0 {height * (1 - sizes[0] / top):.1f}"
    return start + "".join(_steps(sizes, top, width, height))


def timeline_svg(found: Estimate) -> str:
    """A drawing of its own, with title, scale, legend and both colour schemes."""
    timeline = lay_out(found)
    left, top, bottom = 64, 56, 86
    words = [
        _text(
            0, 20, f"{found.model.name}: peak {gib(timeline.peak.total_bytes)}, {_where(timeline)}"
        )
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        figure = timeline.top_bytes * share / GIB
        words.append(_text(0, top + HEIGHT * (1 - share) + 4, f"{figure:,.1f}"))
    for name, start, share in timeline.phases:
        if share > 0.03:
            words.append(_text(left + WIDTH * start, top + HEIGHT + 18, name))
    x = left + WIDTH * timeline.peak_position
    words.append(_text(x, top - 8, "▼", anchor="middle"))
    if timeline.capacity_bytes and found.gpu is not None:
        y = top + HEIGHT * (1 - timeline.capacity_bytes / timeline.top_bytes) - 5
        words.append(_text(left + 6, y, f"{found.gpu.short_name} {gib(timeline.capacity_bytes)}"))
    places = ((left + 230 * number, top + HEIGHT + 46) for number in range(len(Lifetime)))
    for lifetime, (x, y) in zip(Lifetime, places, strict=True):
        words.append(f'<rect class="{lifetime.value}" {_swatch(x, y)}/>')
        words.append(_text(x + 18, y, LIFETIME_WORDS[lifetime]))
    if timeline.added_bytes:
        x, y = left, top + HEIGHT + 68
        words.append(f'<path class="reserved" d="M{x} {y - 5}h12"/>')
        words.append(_text(x + 18, y, RESERVED_WORDS))
        x += 230
        words.append(f'<rect class="added" {_swatch(x, y)}/>')
        words.append(_text(x + 18, y, added_words(found)))
    full_width, full_height = left + WIDTH + 16, top + HEIGHT + bottom
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {full_width + 8} {full_height}" '
        f'role="img"><title>{escape(in_words(found, timeline))}</title><style>{STYLE}</style>'
        f'<rect class="back" x="-8" width="{full_width + 8}" height="{full_height}" fill="#ffffff"/>'
        f'<g transform="translate({left} {top})">{shapes(timeline, width=WIDTH, height=HEIGHT)}</g>'
        f"{''.join(words)}</svg>\n"
    )


def _swatch(x: float, y: float) -> str:
    return f'x="{x}" y="{y - 11}" width="12" height="12"'


def in_words(found: Estimate, timeline: Timeline) -> str:
    """What the drawing shows, for who does not see it."""
    phases = ", ".join(f"{phase.name} {gib(phase.peak_bytes)}" for phase in found.account.phases)
    peak = f"{gib(timeline.peak.total_bytes)} in {_where(timeline)}"
    text = f"Bytes alive over a training step of {found.model.name}: {phases}; the peak is {peak}"
    if timeline.added_bytes:
        reserved = max(moment.reserved_bytes for moment in timeline.columns)
        text += f"; the allocator reserves {gib(reserved)} at most, beside it {added_words(found)}"
    if found.gpu is not None:
        text += f"; {found.gpu.short_name} holds {gib(found.gpu.capacity_bytes)}"
    return text


def _where(timeline: Timeline) -> str:
    place = f" at {timeline.peak.place}" if timeline.peak.place else ""
    return timeline.peak.phase + place


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return (
        f'<text class="words" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def gib(num_bytes: int) -> str:
    """A figure of the report."""
    return f"{num_bytes / GIB:,.2f} GiB"
