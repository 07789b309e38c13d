"""A run replayed in Python, as ``_replay.c`` does it: a place in which it was before is not left twice the same way.

A place lies between two stretches of a run, and is what the allocator's later decisions depend on. Up to the
first question that the allocator would answer otherwise two cards do the same, and where they did not they may
come to one place again.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from memplan.memory.replaying.allocator import ROOM, CachingAllocator, with_streams
from memplan.memory.replaying.expandable import ExpandableAllocator
from memplan.memory.replaying.ledger import Cycle

LASTING = -2
"""Stands for the name of a block that is in use from before the step that recurs."""
STRETCHES = 8
"""Of a run before its step recurs, as near as steps allow."""
MOST_KEPT_BLOCKS = 400_000
"""In all places of one run together, before all are forgotten, which take some 100 bytes each."""


class Way(NamedTuple):
    """What became of the run from one place to the next, or from its beginning on; sizes in units."""

    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    """At their most. A card with less does something else."""
    num_mallocs: int = 0
    num_flushes: int = 0
    lacked: int = ROOM
    """The least capacity with which something else happens."""
    pressed: int = 0
    died_at: int | None = None
    end: "_Place | None" = None
    """None: it died."""

    def and_then(self, way: "Way") -> "Way":
        """Both, one after the other."""
        return Way(
            requested=max(self.requested, way.requested),
            allocated=max(self.allocated, way.allocated),
            reserved=max(self.reserved, way.reserved),
            num_mallocs=self.num_mallocs + way.num_mallocs,
            num_flushes=self.num_flushes + way.num_flushes,
            lacked=min(self.lacked, way.lacked),
            pressed=max(self.pressed, way.pressed),
            died_at=way.died_at,
            end=way.end,
        )


class _Place:
    """Between two stretches of the run."""

    __slots__ = ("_drawn", "base", "num_blocks", "state", "stretch", "ways")

    def __init__(self, stretch: int, base: int, state: Any, num_blocks: int) -> None:
        self.stretch = stretch
        """The next one."""
        self.base = base
        """Blocks of events before it last."""
        self.state = state
        """The allocator's, with its blocks in use."""
        self.num_blocks = num_blocks
        self.ways: list[Way] = []
        self._drawn: object = None

    def is_like(self, other: "_Place") -> bool:
        """Whether all is the same that later decisions depend on."""
        if self.stretch != other.stretch or self.state.look != other.state.look:
            return False
        return self.drawn == other.drawn

    @property
    def drawn(self) -> object:
        """All of it, drawn only where a look does not tell it from another."""
        if self._drawn is None:
            self._drawn = self.state.picture(self._name)
        return self._drawn

    def _name(self, number: int) -> int:
        return number - self.base if number >= self.base else LASTING

    def known(self, capacity: int) -> Way | None:
        """What a card of this capacity does next, if one like it was here."""
        for way in self.ways:
            if way.reserved <= capacity and (capacity < way.lacked or way.lacked == ROOM):
                return way
        return None


class Followed(NamedTuple):
    """How far a run has come."""

    way: Way
    """From the beginning on."""
    num_cycles: int = 0
    flushes: bool = False
    """The cache was given back in the last of these too."""
    is_settled: bool = False


class PythonRun:
    """One run, followed on cards of several capacities."""

    __slots__ = (
        "_allocator",
        "_blocks",
        "_places",
        "_stands",
        "body",
        "cycle",
        "stretches",
    )

    def __init__(
        self,
        events: Sequence[int],
        streams: dict[int, int],
        cycle: Cycle | None,
        *,
        expandable: bool = False,
    ) -> None:
        self.cycle = cycle
        cuts, told = _cuts(len(events), cycle), with_streams(events, streams)
        self.stretches = [(start, told[start:end]) for start, end in pairwise(cuts)]
        """What is played once, each with the number of its first event."""
        self.body = told[cycle.start :] if cycle is not None else ()
        """The step that recurs."""
        self._allocator: Any = ExpandableAllocator() if expandable else CachingAllocator()
        self._blocks: dict[int, Any] = self._allocator.blocks_in_use()
        self._stands: _Place | None = None
        """The place in which the allocator is; None: in none."""
        self._places: list[_Place] = []
        """The beginning, and others in which the run was."""
        self._stands = self._arrive(0)

    def follow(self, capacity_bytes: int | None, *, max_cycles: int) -> Followed:
        """What the run comes to on such a card."""
        if sum(each.num_blocks for each in self._places) > MOST_KEPT_BLOCKS:
            beginning = self._places[0]
            beginning.ways.clear()
            self._places = [beginning]
        capacity = self._allocator.capacity_of(capacity_bytes)
        way = Way(end=self._places[0])
        for _ in self.stretches:
            if way.end is None:
                break
            way = self._further(way, way.end, capacity)
        return self._recur(way, capacity, max_cycles)

    def _recur(self, way: Way, capacity: int, max_cycles: int) -> Followed:
        """The step once more, until the state has been there before: then every later step has been too."""
        cycles, stays, until, flushes = 0, way.end, 1, False
        while self.cycle is not None and way.end is not None and cycles < max_cycles:
            before = way.num_flushes
            way = self._further(way, way.end, capacity)
            cycles += 1
            flushes = way.num_flushes > before
            if way.end is not None and way.end is stays:
                return Followed(way, cycles, flushes, is_settled=True)
            # States may come back after several steps (Brent's way to find a cycle).
            if cycles == until:
                stays, until = way.end, 2 * until
        return Followed(way, cycles, flushes)

    def _further(self, way: Way, place: _Place, capacity: int) -> Way:
        """One stretch further."""
        following = place.known(capacity)
        if following is None:
            following = self._explore(place, capacity)
            place.ways.append(following)
        return way.and_then(following)

    def _explore(self, place: _Place, capacity: int) -> Way:
        """Follow the run from a place to the next one."""
        allocator = self._allocator
        if self._stands is not place:
            self._blocks = allocator.resume(place.state)
        self._stands = None
        allocator.begin(capacity)
        number, died_at = self._follow_stretch(place.stretch)
        if died_at is None:
            self._stands = self._arrive(number)
        return Way(
            requested=allocator.peak_requested,
            allocated=allocator.peak_allocated,
            reserved=allocator.peak_reserved,
            num_mallocs=allocator.num_mallocs,
            num_flushes=allocator.num_flushes,
            lacked=allocator.lacked,
            pressed=allocator.pressed,
            died_at=died_at,
            end=self._stands,
        )

    def _follow_stretch(self, number: int) -> tuple[int, int | None]:
        """The number of the one after it, and where it dies."""
        allocator, blocks = self._allocator, self._blocks
        if number < len(self.stretches):
            start, events = self.stretches[number]
            return number + 1, allocator.follow(events, start, blocks)
        cycle = self.cycle
        assert cycle is not None, "else there is no more to follow"
        # It lets go what the one before it left, as the list says it.
        for event in [each for each in blocks if each >= cycle.start]:
            blocks[event - cycle.start + cycle.before] = blocks.pop(event)
        return number, allocator.follow(self.body, cycle.start, blocks)

    def _arrive(self, stretch: int) -> _Place:
        """The place in which the allocator is: one that was reached before, or a new one."""
        base = self.cycle.start if self.cycle is not None and stretch == len(self.stretches) else 0
        here = _Place(stretch, base, self._allocator.saved(self._blocks), len(self._blocks))
        found = next((each for each in self._places if here.is_like(each)), None)
        if found is not None:
            return found
        self._places.append(here)
        return here


def _cuts(num_events: int, cycle: Cycle | None) -> list[int]:
    """Where stretches of about one length begin, none of which goes beyond a step, and their end."""
    length = num_events // STRETCHES + 1
    borders = [0, *(cycle or ()), num_events]
    cuts = [start for first, last in pairwise(borders) for start in range(first, last, length)]
    return [*cuts, num_events]
