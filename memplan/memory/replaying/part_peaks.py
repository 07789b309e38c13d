"""What a run reaches in each of its parts: bytes asked for, blocks handed out, segments held.

A replay through torch's allocator says the size of every block and what is reserved when it is handed
out; a second pass over the events says in which part that is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.replaying.allocator import CachingAllocator
from memplan.memory.replaying.expandable import ExpandableAllocator
from memplan.memory.replaying.ledger import Block
from memplan.units import round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPeaks:
    """The fullest moments of a part [bytes]; one may be another than the next."""

    requested_bytes: int
    """Requests, each rounded up to ``ALLOCATION_ROUNDING``."""
    allocated_bytes: int
    """Blocks handed out, as ``max_memory_allocated`` counts them."""
    reserved_bytes: int
    """Segments, as ``max_memory_reserved`` counts them."""


Mark = tuple[int, str]
"""From which event on a part runs, and its name."""


def part_peaks(
    events: Sequence[int],
    streams: dict[int, int],
    marks: Sequence[Mark],
    *,
    expandable: bool = False,
) -> dict[str, PartPeaks]:
    """The peaks of every part on a card with room, by its name; the first mark is of event 0.

    A part begins with what is held there, as ``reset_peak_memory_stats`` has it.

    >>> found = part_peaks([512, 1024, ~1, 2048], {}, [(0, "load"), (3, "step")])
    >>> found["load"].requested_bytes, found["step"].requested_bytes
    (1536, 2560)
    """
    watched = _WatchedExpandable() if expandable else _WatchedCaching()
    watched.replay(events, streams)
    levels = list(_levels(events, watched.seen))
    ends = [*(start for start, _ in marks[1:]), len(events)]
    found: dict[str, tuple[int, ...]] = {}
    for (start, name), end in zip(marks, ends, strict=True):
        within = [*levels[start : end + 1], found.get(name, levels[start])]
        found[name] = tuple(map(max, *within))
    return {
        name: PartPeaks(requested_bytes=requested, allocated_bytes=allocated, reserved_bytes=held)
        for name, (requested, allocated, held) in found.items()
    }


def _levels(
    events: Sequence[int], seen: Mapping[Block, tuple[int, int]]
) -> Iterator[tuple[int, ...]]:
    """What is requested, handed out and held before the first event, and behind each."""
    requested = allocated = reserved = 0
    yield requested, allocated, reserved
    for number, event in enumerate(events):
        if event > 0:
            size, reserved = seen[number]
            requested += round_up(event, ALLOCATION_ROUNDING)
            allocated += size
        elif event < 0:
            requested -= round_up(events[~event], ALLOCATION_ROUNDING)
            allocated -= seen[~event][0]
        yield requested, allocated, reserved


class _Noting(dict[int, Any]):
    """Blocks in use, of which each is noted as it is handed out."""

    def __init__(self, watch: "_WatchedCaching | _WatchedExpandable") -> None:
        super().__init__()
        self.watch = watch

    def __setitem__(self, block: Block, found: Any) -> None:
        super().__setitem__(block, found)
        self.watch.seen[block] = self.watch.sizes(found)


class _WatchedCaching(CachingAllocator):
    """Notes the size of each block, and what is reserved then [bytes]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Block, tuple[int, int]] = {}

    def blocks_in_use(self) -> _Noting:
        return _Noting(self)

    def sizes(self, found: Any) -> tuple[int, int]:
        size: int = found[1]
        return size * ALLOCATION_ROUNDING, self._reserved * ALLOCATION_ROUNDING


class _WatchedExpandable(ExpandableAllocator):
    """The same with expandable segments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Block, tuple[int, int]] = {}

    def blocks_in_use(self) -> _Noting:
        return _Noting(self)

    def sizes(self, found: Any) -> tuple[int, int]:
        size: int = found[1].size
        return size * ALLOCATION_ROUNDING, self.reserved * ALLOCATION_ROUNDING
