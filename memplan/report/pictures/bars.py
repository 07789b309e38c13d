"""Stacked bars: bytes by component, of each phase of a run or of each rank of a pipeline."""

from collections.abc import Mapping, Sequence

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind
from memplan.report.pictures.canvas import (
    CHARACTER,
    LINE,
    Canvas,
    Shape,
    Stroke,
    Words,
    box,
    legend,
)
from memplan.report.pictures.picture import Picture
from memplan.units import GIB

WIDTH = 960
MARGIN = 12
BAR, GAP = 26, 14
FIGURE_ROOM = 92
"""Right of the bars, for what each comes to."""
CHART_FILLS = "█▓&$G░#▒@%*+=:."
"""A component with a character, where there is no colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar."""

    name: str
    components: Mapping[ComponentKind, int]
    """Bytes, in the order in which they are stacked."""
    is_peak: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.components.values())


def phases_picture(found: Estimate, *, reaching_bytes: int = 0) -> Picture:
    """Every phase of a run at its own peak, beside the card's memory.

    Bars have room for ``reaching_bytes`` too: setups beside each other are drawn on one scale.
    """
    bars = [
        Bar(
            name=phase.name,
            components={
                kind: phase.components[kind.label]
                for kind in ComponentKind
                if phase.components.get(kind.label)
            },
            is_peak=phase.name == found.peak_phase,
        )
        for phase in found.account.phases
    ]
    return _picture(
        found,
        bars,
        title=f"{found.model.name}: bytes by phase and component",
        of="phase",
        reaching_bytes=reaching_bytes,
    )


def ranks_picture(found: Estimate) -> Picture:
    """Every place of a pipeline at its own peak: its ranks, its stages, what is in flight.

    Raises ``SetupError`` for a setup without a pipeline.
    """
    from memplan.errors import SetupError
    from memplan.report.stages import pipeline_places, ranks_words

    places = pipeline_places(found)
    if not places:
        msg = "ranks: the setup has no pipeline, so its ranks hold the same"
        raise SetupError(msg)
    top = max(place.account.peak.peak_bytes for place in places)
    bars = []
    for place in places:
        stages = ", ".join(f"{stage.number} ({stage.words})" for stage in place.stages)
        components = place.account.peak.components
        bars.append(
            Bar(
                name=f"{'rank' if len(place.ranks) == 1 else 'ranks'} {ranks_words(place.ranks)}: stage {stages}, {place.in_flight} in flight",
                components={
                    kind: components[kind.label]
                    for kind in ComponentKind
                    if components.get(kind.label)
                },
                is_peak=place.account.peak.peak_bytes == top,
            )
        )
    return _picture(found, bars, title=f"{found.model.name}: ranks of the pipeline", of="ranks")


def _picture(
    found: Estimate, bars: Sequence[Bar], *, title: str, of: str, reaching_bytes: int = 0
) -> Picture:
    kinds = [kind for kind in ComponentKind if any(kind in bar.components for bar in bars)]
    fullest = max(bars, key=lambda bar: bar.total_bytes)
    words = f"{fullest.name} is the fullest: {_gib(fullest.total_bytes)} GiB"
    if found.gpu is not None:
        words += f"; {found.gpu.short_name} holds {_gib(found.gpu.capacity_bytes)} GiB"
    head = (of, *(name_of(kind) for kind in kinds), "GiB in all")
    rows = tuple(
        (
            bar.name,
            *(_gib(bar.components[kind]) if kind in bar.components else "" for kind in kinds),
            _gib(bar.total_bytes),
        )
        for bar in bars
    )
    return Picture(
        title=title, words=words, canvas=_drawn(found, bars, kinds, reaching_bytes), head=head, rows=rows,
        chart=tuple(_chart(bars, kinds)),
    )  # fmt: skip


def name_of(kind: ComponentKind) -> str:
    """A component in words."""
    return kind.label.replace("_", " ")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"


def _drawn(
    found: Estimate, bars: Sequence[Bar], kinds: Sequence[ComponentKind], reaching_bytes: int
) -> Canvas:
    """Names above bars that are long, or left of them; figures right of them."""
    is_long = max(len(bar.name) for bar in bars) > 16
    left = MARGIN if is_long else MARGIN + 16 * CHARACTER
    room = WIDTH - left - FIGURE_ROOM - MARGIN
    top_bytes = max(reaching_bytes, *(bar.total_bytes for bar in bars))
    capacity = found.gpu.capacity_bytes if found.gpu is not None else 0
    has_card = top_bytes / 4 < capacity
    scale = room / max(top_bytes, capacity if capacity < 4 * top_bytes else 0)
    shapes: list[Shape] = []
    y = 30.0
    for bar in bars:
        mark = "▸ " if bar.is_peak else ""
        if is_long:
            shapes.append(Words(x=MARGIN, y=y + 4, text=mark + bar.name, is_bold=bar.is_peak))
            y += 12
        else:
            shapes.append(Words(x=MARGIN, y=y + 18, text=mark + bar.name, is_bold=bar.is_peak))
        x = float(left)
        for kind, size in bar.components.items():
            told = f"{bar.name}: {name_of(kind)} {_gib(size)} GiB"
            shapes.append(box(x, y, size * scale, BAR, kind.label, told))
            x += size * scale
        total = f"{_gib(bar.total_bytes)} GiB"
        shapes.append(
            Words(x=WIDTH - MARGIN, y=y + 18, text=total, anchor="end", is_bold=bar.is_peak)
        )
        y += BAR + GAP
    if has_card and capacity < 4 * top_bytes and found.gpu is not None:
        x = left + capacity * scale
        shapes.append(Stroke(points=((x, 22), (x, y)), colour="red", dashed=True))
        text = f"{found.gpu.short_name} {_gib(capacity)} GiB"
        shapes.append(Words(x=x, y=16, text=text, anchor="end"))
    named = [(kind.label, name_of(kind)) for kind in kinds]
    below, end = legend(named, x=MARGIN, y=y + 14, width=WIDTH - 2 * MARGIN)
    return Canvas(width=WIDTH, height=end + LINE, shapes=(*shapes, *below))


def _chart(bars: Sequence[Bar], kinds: Sequence[ComponentKind], width: int = 78) -> list[str]:
    """The bars with characters, each component with its own."""
    names = max(len(bar.name) for bar in bars)
    is_long = names > 16
    room = width - (0 if is_long else names + 2) - 11
    top = max(bar.total_bytes for bar in bars)
    fills = dict(zip(ComponentKind, CHART_FILLS, strict=True))
    lines = []
    for bar in bars:
        drawn, below = "", 0
        for kind, size in bar.components.items():
            below += size
            drawn += fills[kind] * (round(room * below / top) - len(drawn))
        mark = "*" if bar.is_peak else " "
        if is_long:
            lines.append(f"{bar.name}{mark}".rstrip())
        start = "" if is_long else f"{bar.name:<{names}}{mark} "
        lines.append(f"{start}{drawn:<{room}} {_gib(bar.total_bytes):>9}")
    told = [f"{fills[kind]} {name_of(kind)}" for kind in kinds]
    line = ""
    for each in told:
        if len(line) + len(each) + 2 > width:
            lines.append(line)
            line = ""
        line += ("  " if line else "") + each
    return [*lines, line, "GiB, each at its own peak; * the fullest of a step"]
