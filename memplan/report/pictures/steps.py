"""A training step in order: what is alive at each event by component, its peak marked."""

from collections.abc import Sequence

from memplan.estimator import Estimate
from memplan.memory.account import ComponentKind
from memplan.report.pages.step_layout import Timeline, gib, in_words, lay_out
from memplan.report.pictures.bars import name_of
from memplan.report.pictures.canvas import (
    CHARACTER,
    LINE,
    Area,
    Canvas,
    Shape,
    Stroke,
    Words,
    box,
    legend,
    round_ticks,
)
from memplan.report.pictures.picture import Picture
from memplan.report.timeline import Moment, added_words, columns_of, timeline_lines
from memplan.units import GIB

WIDTH, HEIGHT = 880, 320
LEFT, TOP = 64, 44
MAX_ROWS = 36
"""Of the table: of each stretch the fullest moment."""


def step_picture(found: Estimate) -> Picture:
    """A step, stacked by component."""
    timeline = lay_out(found)
    kinds = [
        kind
        for kind in ComponentKind
        if any(each.components.get(kind) for each in timeline.columns)
    ]
    head = (
        "phase",
        "at",
        *(name_of(kind) for kind in kinds),
        "GiB alive",
        "GiB reserved",
        "largest",
    )
    apart = {id(each): each for each in timeline.columns}
    shown = {id(each): each for each in columns_of(list(apart.values()), MAX_ROWS)}
    rows = tuple(_row(each, kinds, timeline.peak) for each in shown.values())
    return Picture(
        title=f"{found.model.name}: a training step",
        words=in_words(found, timeline),
        canvas=_drawn(found, timeline, kinds),
        head=head,
        rows=rows,
        chart=tuple(timeline_lines(found, width=78)),
    )


def _row(moment: Moment, kinds: Sequence[ComponentKind], peak: Moment) -> tuple[str, ...]:
    sizes = (moment.components.get(kind, 0) for kind in kinds)
    largest = f"{moment.largest[0][0]} {gib(moment.largest[0][1])}" if moment.largest else ""
    return (
        f"{moment.phase} (peak)" if moment is peak else moment.phase,
        moment.place,
        *(f"{size / GIB:,.2f}" if size else "" for size in sizes),
        f"{moment.total_bytes / GIB:,.2f}",
        f"{moment.reserved_bytes / GIB:,.2f}" if moment.reserved_bytes else "",
        largest,
    )


def _drawn(found: Estimate, timeline: Timeline, kinds: Sequence[ComponentKind]) -> Canvas:
    shapes: list[Shape] = []
    for tick in round_ticks(timeline.top_bytes / GIB):
        y = _height(tick * GIB, timeline)
        shapes.append(Stroke(points=((LEFT, y), (LEFT + WIDTH, y)), colour="edge"))
        shapes.append(Words(x=LEFT - 8, y=y + 4, text=f"{tick:,g}", anchor="end"))
    shapes += _areas(timeline, kinds)
    shapes += _marks(found, timeline)
    names = [(kind.label, name_of(kind)) for kind in kinds]
    if timeline.added_bytes:
        names.append(("added", added_words(found)))
    below, end = legend(names, x=LEFT, y=TOP + HEIGHT + 46, width=WIDTH)
    note = "GiB; events in order, not seconds"
    shapes += [*below, Words(x=LEFT, y=end + LINE, text=note)]
    return Canvas(width=LEFT + WIDTH + 16, height=end + 2 * LINE, shapes=tuple(shapes))


def _height(num_bytes: float, timeline: Timeline) -> float:
    return TOP + HEIGHT * (1 - num_bytes / timeline.top_bytes)


def _areas(timeline: Timeline, kinds: Sequence[ComponentKind]) -> list[Shape]:
    """The components one on another, and over each moment what it holds, told where a pointer rests."""
    columns = timeline.columns
    step = WIDTH / len(columns)
    below = [0] * len(columns)
    shapes: list[Shape] = []
    for kind in kinds:
        above = [
            size + each.components.get(kind, 0) for size, each in zip(below, columns, strict=True)
        ]
        shapes.append(_band(below, above, timeline, kind.label))
        below = above
    reserved = [each.reserved_bytes for each in columns if each.reserved_bytes]
    if reserved:
        upper = [size + timeline.added_bytes for size in reserved]
        shapes.append(_band(reserved, upper, timeline, "added"))
        edge = _steps(reserved, timeline)
        shapes.append(Stroke(points=tuple(edge), colour="ink"))
    start = 0
    for place in range(1, len(columns) + 1):
        if place < len(columns) and columns[place] is columns[start]:
            continue
        words = _told(columns[start])
        shapes.append(box(LEFT + start * step, TOP, (place - start) * step, HEIGHT, "", words))
        start = place
    return shapes


def _told(moment: Moment) -> str:
    """What a moment holds, and its largest tensors, line by line."""
    where = f" at {moment.place}" if moment.place else ""
    lines = [f"{moment.phase}{where}: {gib(moment.total_bytes)}"]
    lines += [f"{gib(size)}  {name}" for name, size in moment.largest]
    return "\n".join(lines)


def _steps(sizes: Sequence[int], timeline: Timeline) -> list[tuple[float, float]]:
    """Along these heights, at right angles."""
    step = WIDTH / len(timeline.columns)
    points = []
    for place, size in enumerate(sizes):
        y = _height(size, timeline)
        points += [(LEFT + place * step, y), (LEFT + (place + 1) * step, y)]
    # A point between two of the same height says nothing.
    return [
        point
        for place, point in enumerate(points)
        if place in (0, len(points) - 1)
        or not points[place - 1][1] == point[1] == points[place + 1][1]
    ]


def _band(below: Sequence[int], above: Sequence[int], timeline: Timeline, fill: str) -> Area:
    points = [*_steps(above, timeline), *reversed(_steps(below, timeline))]
    return Area(points=tuple(points), fill=fill)


def _marks(found: Estimate, timeline: Timeline) -> list[Shape]:
    """The phases' names, the peak, and the card's memory."""
    shapes: list[Shape] = []
    for name, start, share in timeline.phases:
        x = LEFT + WIDTH * start
        shapes.append(Stroke(points=((x, TOP + HEIGHT), (x, TOP + HEIGHT + 6)), colour="soft"))
        if share * WIDTH > CHARACTER * len(name):
            shapes.append(Words(x=x + 3, y=TOP + HEIGHT + 18, text=name))
    peak = timeline.peak
    where = f" at {peak.place}" if peak.place else ""
    is_right = timeline.peak_position > 0.5
    words = f"peak {gib(peak.total_bytes)}, {peak.phase}{where}"
    shapes.append(
        Words(
            x=LEFT + WIDTH * timeline.peak_position,
            y=TOP - 26,
            is_bold=True,
            text=f"{words} ▼" if is_right else f"▼ {words}",
            anchor="end" if is_right else "start",
        )
    )
    if timeline.capacity_bytes and found.gpu is not None:
        y = _height(timeline.capacity_bytes, timeline)
        shapes.append(Stroke(points=((LEFT, y), (LEFT + WIDTH, y)), colour="red", dashed=True))
        text = f"{found.gpu.short_name} {gib(timeline.capacity_bytes)}"
        shapes.append(Words(x=LEFT + WIDTH - 4, y=y - 5, text=text, anchor="end"))
    return shapes
