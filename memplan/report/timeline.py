"""The bytes of a training step in the order in which things happen, as data and as characters.

The axis counts events (a layer forward, a layer backward), not seconds.
"""

from collections.abc import Iterable, Sequence

from memplan.estimator import Estimate
from memplan.estimator.estimation import record_and_walk, tape_options
from memplan.estimator.named_run import play_estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Lifetime, Phase
from memplan.memory.levels import RunLevel, run_levels
from memplan.memory.named import NamedRun
from memplan.memory.step import Height, StepPasses
from memplan.training.precision import Engine
from memplan.units import GIB

NUM_ROWS = 14
"""Lines of the drawing."""
NUM_COLUMNS = 76
FILLS = {Lifetime.LONG: "█", Lifetime.MEDIUM: "▒", Lifetime.SHORT: "░"}
RESERVED = "·"
"""What the allocator holds, above what is alive."""
LIFETIME_WORDS = {
    Lifetime.LONG: "long: the whole run",
    Lifetime.MEDIUM: "medium: forward to backward",
    Lifetime.SHORT: "short: within operations",
}
_WALKED = frozenset(
    {ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS, ComponentKind.TEMPORARIES}
)
"""Components that come out of the walk; the others are the engine's."""


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

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.long_bytes + self.medium_bytes + self.short_bytes


def step_moments(found: Estimate) -> tuple[Moment, ...]:
    """Every event of a step, loading first: of each layer its fullest moment, then what it leaves.

    They are those of the run as it is played block by block. Where an engine's is not known so, its
    own buffers stand at the height that they have at their phase's peak, under the activations.
    """
    run = play_estimate(found)
    return _laid_moments(found) if run is None else _played_moments(found, run)


def _played_moments(found: Estimate, run: NamedRun) -> tuple[Moment, ...]:
    moments = [_moment_of(level) for level in run_levels(run)]
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
    )


def _laid_moments(found: Estimate) -> tuple[Moment, ...]:
    _, passes = record_and_walk(found.model, tape_options(found.setup, found.gpu))
    phases = found.phases
    moments = [_flat("load", phases["load"])] if "load" in phases else []
    plain = found.setup.chosen_engine is Engine.DDP and found.setup.num_gpus == 1
    for name, heights in (
        ("forward", forward_heights(passes)),
        ("backward", backward_heights(passes, gradients=plain)),
    ):
        if name in phases:
            moments += _laid_over(phases[name], heights, plain=plain)
    moments += [_flat(name, phases[name]) for name in ("step", "save") if name in phases]
    return tuple(moments)


def forward_heights(passes: StepPasses) -> list[tuple[str, Height]]:
    """Each layer's forward pass: its highest moment, then what it leaves."""
    heights = []
    for each in passes.forward:
        for repetition in range(each.segment.repeat):
            risen = 0
            if repetition:
                risen = each.first_bytes + (repetition - 1) * each.later_bytes
            start = _risen(each.start, risen, loss=each.loss)
            left = each.later_bytes if repetition else each.first_bytes
            heights.append((each.segment.name, start.plus(each.peak, loss=each.loss)))
            heights.append((each.segment.name, _risen(start, left, loss=each.loss)))
    heights.append(("loss", passes.after_forward))
    return heights


def backward_heights(passes: StepPasses, *, gradients: bool) -> list[tuple[str, Height]]:
    """Each layer's backward pass: its highest moment, then what it leaves."""
    heights: list[tuple[str, Height]] = []
    finished = 0
    for each in passes.backward:
        for repetition in range(each.repeats):
            start = each.start_of(repetition)
            within = []
            for interval in each.intervals:
                height = start.plus(interval.peak, loss=each.loss)
                within.append(height.with_gradients(finished))
                finished += interval.gradient_bytes if gradients else 0
            top = max(within, key=lambda height: height.total_bytes)
            heights.append((each.segment.name, top))
            after = each.start_of(repetition + 1).with_gradients(finished)
            heights.append((each.segment.name, after))
    return heights


def _risen(height: Height, num_bytes: int, *, loss: bool) -> Height:
    from memplan.memory.walk import Level

    return height.plus(Level(saved_bytes=num_bytes), loss=loss)


def _flat(name: str, phase: Phase) -> Moment:
    totals = by_lifetime(phase)
    return Moment(name, "", totals[Lifetime.LONG], totals[Lifetime.MEDIUM], totals[Lifetime.SHORT])


def by_lifetime(phase: Phase) -> dict[Lifetime, int]:
    """A phase's bytes at its own peak, by how long they are held."""
    totals = dict.fromkeys(Lifetime, 0)
    for entry in phase.entries:
        totals[entry.kind.lifetime] += entry.num_bytes
    return totals


def _laid_over(phase: Phase, heights: Iterable[tuple[str, Height]], *, plain: bool) -> list[Moment]:
    held = short = gradients = 0
    for entry in phase.entries:
        if entry.kind in _WALKED:
            continue
        if entry.kind is ComponentKind.GRADIENTS:
            gradients += entry.num_bytes
        elif entry.kind.lifetime is Lifetime.SHORT:
            short += entry.num_bytes
        else:
            held += entry.num_bytes
    moments = []
    for place, height in heights:
        medium = max(0, height.activations_bytes + height.loss_bytes)
        # The peak is where engine and activations together are highest, not where each of them is.
        room = max(0, phase.peak_bytes - held - medium)
        ready = height.gradients_bytes if plain else min(gradients, room)
        passing = min(max(0, height.temporaries_bytes) + short, max(0, room - ready))
        moments.append(Moment(phase.name, place, held + ready, medium, passing))
    return moments


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


def timeline_lines(found: Estimate, *, width: int = NUM_COLUMNS) -> list[str]:
    """The step drawn with characters: lifetimes stacked, the peak marked, the GPU as a line."""
    columns = stretched(columns_of(step_moments(found), width), width)
    peak = max(columns, key=lambda moment: moment.total_bytes)
    capacity = found.gpu.capacity_bytes if found.gpu is not None else 0
    shown = 0 < capacity <= 2 * peak.total_bytes
    reserved = max(moment.reserved_bytes for moment in columns)
    top = max(peak.total_bytes, reserved, capacity if shown else 0) * 1.02
    lines = []
    for row in reversed(range(NUM_ROWS)):
        low, high = top * row / NUM_ROWS, top * (row + 1) / NUM_ROWS
        line = shown and low <= capacity < high
        cells = "".join(
            _cell(moment, (low + high) / 2)
            or (RESERVED if low <= moment.reserved_bytes < high else "╌" if line else " ")
            for moment in columns
        )
        label = f"{high / GIB:7.1f} ┤" if row % 3 == (NUM_ROWS - 1) % 3 else " " * 8 + "│"
        names = [found.gpu.gpu_id] if line and found.gpu is not None else []
        if reserved and low <= reserved < high:
            names.append(f"{RESERVED} reserved")
        lines.append((label + cells).rstrip() + (" " + ", ".join(names) if names else ""))
    lines.append(f"{0:7.1f} ┼" + "─" * len(columns))
    lines.append(" " * 9 + _phase_labels(columns))
    lines.insert(0, _peak_line(columns, peak))
    legend = "  ".join(f"{FILLS[each]} {LIFETIME_WORDS[each]}" for each in Lifetime)
    lines.append(" " * 9 + legend)
    if capacity and not shown:
        assert found.gpu is not None
        lines.append(
            f"         {found.gpu.gpu_id} holds {capacity / GIB:,.1f} GiB, beyond this drawing"
        )
    return lines


def _cell(moment: Moment, level: float) -> str:
    if level < moment.long_bytes:
        return FILLS[Lifetime.LONG]
    if level < moment.long_bytes + moment.medium_bytes:
        return FILLS[Lifetime.MEDIUM]
    return FILLS[Lifetime.SHORT] if level < moment.total_bytes else ""


def _peak_line(columns: Sequence[Moment], peak: Moment) -> str:
    position = next(index for index, moment in enumerate(columns) if moment is peak)
    place = f" at {peak.place}" if peak.place else ""
    text = f"peak {peak.total_bytes / GIB:,.2f} GiB, {peak.phase}{place}"
    if position > len(columns) // 2:
        return "GiB" + " " * max(1, 9 + position - len(text) - 4) + f"{text} ▼"
    return "GiB" + " " * (6 + position) + f"▼ {text}"


def _phase_labels(columns: Sequence[Moment]) -> str:
    text = ""
    for name in dict.fromkeys(moment.phase for moment in columns):
        width = sum(moment.phase == name for moment in columns)
        text += f"|{name}"[:width].ljust(width)
    return text.rstrip()
