"""The bytes of a training step in the order in which things happen, as data and as characters.

The axis counts events (a layer forward, a layer backward), not seconds.
"""

from collections.abc import Mapping, Sequence

from memplan.estimator import Estimate
from memplan.estimator.named_run import named_run
from memplan.fast_dataclass import dataclass, field
from memplan.memory.account import ComponentKind, Lifetime, Phase
from memplan.memory.snapshots.levels import RunLevel, run_levels
from memplan.units import GIB

NUM_ROWS = 14
"""Lines of the drawing."""
NUM_COLUMNS = 76
FILLS = {Lifetime.LONG: "█", Lifetime.MEDIUM: "▒", Lifetime.SHORT: "░"}
RESERVED = "·"
"""What the allocator holds, above what is alive."""
ADDED = "+"
"""CUDA context and NCCL at their high end, above what the allocator holds; at least one line."""
LIFETIME_WORDS = {
    Lifetime.LONG: "long: the whole run",
    Lifetime.MEDIUM: "medium: forward to backward",
    Lifetime.SHORT: "short: within operations",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one event."""

    phase: str
    place: str
    """The segment of the model that runs."""
    long_bytes: int
    medium_bytes: int
    short_bytes: int
    reserved_bytes: int = 0
    """What the allocator holds by then; 0: it is not known."""
    components: Mapping[ComponentKind, int] = field(default_factory=dict)
    """The same by component."""
    largest: tuple[tuple[str, int], ...] = ()
    """Tensors and buffers by name, the largest first; a few."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.long_bytes + self.medium_bytes + self.short_bytes


def step_moments(found: Estimate) -> tuple[Moment, ...]:
    """Every event of a step, loading first: of each layer its fullest moment, then what it leaves.

    They are those of the run as it is played block by block; a checkpoint is written between steps.
    """
    moments = [_moment_of(level) for level in run_levels(named_run(found))]
    if "save" in found.phases:
        moments.append(_flat("save", found.phases["save"]))
    return tuple(moment for moment in moments if moment.phase in found.phases)


def _moment_of(level: RunLevel) -> Moment:
    totals = dict.fromkeys(Lifetime, 0)
    for kind, num_bytes in level.components.items():
        totals[kind.lifetime] += num_bytes
    stretch = level.stretch
    return Moment(
        stretch.part.value,
        stretch.segment.name if stretch.segment is not None else "",
        totals[Lifetime.LONG],
        totals[Lifetime.MEDIUM],
        totals[Lifetime.SHORT],
        level.reserved_bytes,
        level.components,
        level.largest,
    )


def _flat(name: str, phase: Phase) -> Moment:
    totals = by_lifetime(phase)
    components: dict[ComponentKind, int] = {}
    for entry in phase.entries:
        components[entry.kind] = components.get(entry.kind, 0) + entry.num_bytes
    long, medium, short = (totals[each] for each in Lifetime)
    return Moment(name, "", long, medium, short, components=components)


def by_lifetime(phase: Phase) -> dict[Lifetime, int]:
    """A phase's bytes at its own peak, by how long they are held."""
    totals = dict.fromkeys(Lifetime, 0)
    for entry in phase.entries:
        totals[entry.kind.lifetime] += entry.num_bytes
    return totals


def columns_of(moments: Sequence[Moment], count: int) -> list[Moment]:
    """At most ``count`` moments: of each stretch the fullest one, phases kept apart.

    >>> moments = [Moment("forward", "", size, 0, 0) for size in range(10)]
    >>> [moment.total_bytes for moment in columns_of(moments, 5)]
    [1, 3, 5, 7, 9]
    """
    phases = list(dict.fromkeys(moment.phase for moment in moments))
    groups = [[moment for moment in moments if moment.phase == name] for name in phases]
    wide = max(1, count // _SINGLE_SHARE)
    single = sum(len(group) == 1 for group in groups)
    spare = max(len(groups), count - single * wide)
    total = sum(len(group) for group in groups if len(group) > 1)
    columns: list[Moment] = []
    for group in groups:
        if len(group) == 1:
            columns += group * wide
            continue
        width = max(1, min(len(group), spare * len(group) // total))
        columns += [
            max(
                group[index * len(group) // width : (index + 1) * len(group) // width],
                key=lambda moment: moment.total_bytes,
            )
            for index in range(width)
        ]
    return columns


_SINGLE_SHARE = 12
"""A phase that is one moment has one column in so many."""


def stretched(columns: Sequence[Moment], count: int) -> list[Moment]:
    """The columns repeated so that a short step fills the width too."""
    times = max(1, count // max(1, len(columns)))
    return [moment for moment in columns for _ in range(times)]


AXIS = 9
"""Characters left of the drawing."""
NAMES = 26
"""Characters right of it, where lines are named."""
LEAST_DRAWN = 40
"""Columns below which lines are named under the drawing instead."""


def timeline_lines(found: Estimate, *, width: int = AXIS + NUM_COLUMNS + NAMES) -> list[str]:
    """The step drawn with characters: lifetimes stacked, the peak marked, the GPU as a line.

    In ``width`` characters at the most; from 40 on.
    """
    has_room = width - AXIS - NAMES >= LEAST_DRAWN
    drawn = min(NUM_COLUMNS, width - AXIS - (NAMES if has_room else 0))
    columns = stretched(columns_of(step_moments(found), drawn), drawn)
    peak = max(columns, key=lambda moment: moment.total_bytes)
    scale = _scale_of(found, columns, peak)
    named: list[str] = []
    lines = [_peak_line(columns, peak, width)]
    for row in reversed(range(NUM_ROWS)):
        names = _row_names(found, scale, row, has_room=has_room)
        beside = " " + ", ".join(names) if names and has_room else ""
        named += names if not has_room else []
        lines.append(_row_cells(columns, scale, row).rstrip() + beside)
    lines.append(f"{0:7.1f} ┼" + "─" * len(columns))
    lines.append(" " * 9 + _phase_labels(columns))
    words = [*(f"{FILLS[each]} {LIFETIME_WORDS[each]}" for each in Lifetime), *named]
    lines += _legend_lines(words, width)
    if found.gpu is not None and not scale.is_line_shown:
        text = f"{found.gpu.short_name} holds {scale.capacity / GIB:,.1f} GiB, beyond this drawing"
        lines += _legend_lines(text.split(), width, gap=" ")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """What the drawing's height stands for [bytes]."""

    top: float
    capacity: int
    """Of the card; 0: none is named."""
    is_line_shown: bool
    """The card's line lies within the drawing."""
    reserved: int
    added: int
    """What lies above what is reserved; at least one line of the drawing."""

    def row(self, row: int) -> tuple[float, float]:
        """From where to where a line of the drawing goes."""
        return self.top * row / NUM_ROWS, self.top * (row + 1) / NUM_ROWS

    def has_line(self, row: int) -> bool:
        """Whether the card's line lies there."""
        low, high = self.row(row)
        return self.is_line_shown and low <= self.capacity < high


def _scale_of(found: Estimate, columns: Sequence[Moment], peak: Moment) -> _Scale:
    """As high as what is drawn, with the card's line where that is not far above."""
    capacity = found.gpu.capacity_bytes if found.gpu is not None else 0
    shown = 0 < capacity <= 2 * peak.total_bytes
    reserved = max(moment.reserved_bytes for moment in columns)
    added = found.overhead_bytes.high if reserved else 0
    least = reserved * NUM_ROWS // (NUM_ROWS - 1)
    top = max(peak.total_bytes, reserved + added, least, capacity if shown else 0) * 1.02
    added = max(added, int(top / NUM_ROWS)) if reserved else 0
    return _Scale(top=top, capacity=capacity, is_line_shown=shown, reserved=reserved, added=added)


def _row_cells(columns: Sequence[Moment], scale: _Scale, row: int) -> str:
    """A line of the drawing, its axis before it."""
    low, high = scale.row(row)
    empty = "╌" if scale.has_line(row) else " "
    label = f"{high / GIB:7.1f} ┤" if row % 3 == (NUM_ROWS - 1) % 3 else " " * 8 + "│"
    return label + "".join(
        _cell(moment, (low + high) / 2) or _above(moment, low, high, scale.added) or empty
        for moment in columns
    )


def _row_names(found: Estimate, scale: _Scale, row: int, *, has_room: bool) -> list[str]:
    """What lies on a line of the drawing, in words."""
    low, high = scale.row(row)
    gpu = found.gpu.short_name if found.gpu is not None else ""
    names = [gpu if has_room else f"╌ {gpu}"] if scale.has_line(row) else []
    if scale.reserved and low <= scale.reserved < high:
        names.append(f"{RESERVED} reserved")
    if scale.added and low <= scale.reserved + scale.added * 0.5 < high:
        overhead = found.overhead_bytes
        names.append(f"{ADDED} {overhead.low / GIB:.1f}-{overhead.high / GIB:.1f} {_beside(found)}")
    return names


def _legend_lines(words: Sequence[str], width: int, *, gap: str = "  ") -> list[str]:
    """Words below the drawing, in as many lines as they take."""
    lines = [" " * AXIS + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
        else:
            lines.append(" " * AXIS + word)
    return lines


def _cell(moment: Moment, level: float) -> str:
    if level < moment.long_bytes:
        return FILLS[Lifetime.LONG]
    if level < moment.long_bytes + moment.medium_bytes:
        return FILLS[Lifetime.MEDIUM]
    return FILLS[Lifetime.SHORT] if level < moment.total_bytes else ""


def _above(moment: Moment, low: float, high: float, added: int) -> str:
    """What a line shows above what is alive: the allocator's, or what lies beside it."""
    reserved = moment.reserved_bytes
    if low <= reserved < high:
        return RESERVED
    return ADDED if reserved and reserved < low < reserved + added else ""


def _beside(found: Estimate) -> str:
    return "context, NCCL" if found.setup.num_gpus > 1 else "context"


def added_words(found: Estimate) -> str:
    """What lies beside the allocator's segments, and how much of it, for a legend."""
    low, high = (each / GIB for each in (found.overhead_bytes.low, found.overhead_bytes.high))
    nccl = " and NCCL" if found.setup.num_gpus > 1 else ""
    return f"CUDA context{nccl}, {low:.1f}-{high:.1f} GiB"


def _peak_line(columns: Sequence[Moment], peak: Moment, width: int) -> str:
    position = next(index for index, moment in enumerate(columns) if moment is peak)
    place = f" at {peak.place}" if peak.place else ""
    text = f"peak {peak.total_bytes / GIB:,.2f} GiB, {peak.phase}{place}"
    if len(text) + 6 > width:
        text = f"peak {peak.total_bytes / GIB:,.2f} GiB, {peak.phase}"
    is_left = position + 6 + len(text) > width - 6 or position > len(columns) // 2
    if is_left:
        return "GiB" + " " * max(1, 9 + position - len(text) - 4) + f"{text} ▼"
    return "GiB" + " " * (6 + position) + f"▼ {text}"


def _phase_labels(columns: Sequence[Moment]) -> str:
    text = ""
    for name in dict.fromkeys(moment.phase for moment in columns):
        width = sum(moment.phase == name for moment in columns)
        text += f"|{name}"[:width].ljust(width)
    return text.rstrip()
