"""A step laid out: its moments, the scale, the peak, and what is to be said of them."""

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.report.timeline import (
    Moment,
    added_words,
    columns_of,
    step_moments,
    stretched,
)
from memplan.units import GIB

MAX_COLUMNS = 240
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


def gib(num_bytes: int) -> str:
    """A figure of the report."""
    return f"{num_bytes / GIB:,.2f} GiB"
