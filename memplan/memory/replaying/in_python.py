"""A run replayed in Python, from the last place that it has in common with what another card did.

Up to the first question that the allocator would answer otherwise two cards do the same. So a run that is
asked about again keeps some of the states in which it was, each with the capacities that lead there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from memplan.memory.replaying.allocator import ROOM, CachingAllocator, Picture
from memplan.memory.replaying.expandable import ExpandableAllocator
from memplan.memory.replaying.ledger import Cycle

LASTING = -2
"""Stands for the name of a block that is in use from before the step that recurs."""
STRETCHES = 8
"""Of a run before its step recurs, after each of which a place is kept."""
MOST_PLACES = 16
"""Of one run, the latest: a place takes as much memory as the blocks that are there."""


class Followed(NamedTuple):
    """How far a run has come, where the allocator is apart."""

    stretches: int = 0
    """How many are behind it."""
    died_at: int | None = None
    num_cycles: int = 0
    flushes: bool = False
    """The cache was given back in the last of these too."""
    is_settled: bool = False
    until: int = 1
    """The number of steps after which the state is kept anew (Brent's way to find a cycle)."""
    kept: "_Picture | None" = None
    """The state with which later ones are compared."""


class _Place(NamedTuple):
    """Where a run was, to go on from."""

    followed: Followed
    state: object
    """The allocator's."""
    blocks: dict[int, Any]
    least: int
    """The capacities with which it comes there: from this one on [units]."""
    lacked: int
    """From which on it does not [units]."""

    def leads(self, capacity: int, max_cycles: int) -> bool:
        """Whether a card comes there in so many further steps."""
        if self.followed.num_cycles > max_cycles:
            return False
        return self.least <= capacity and (capacity < self.lacked or self.lacked == ROOM)


class PythonRun:
    """One run, followed on cards of several capacities."""

    __slots__ = (
        "_is_asked_again",
        "_places",
        "body",
        "cycle",
        "expandable",
        "streams",
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
        self.streams = streams
        self.cycle = cycle
        self.expandable = expandable
        length = max(1, -(-len(events) // STRETCHES))
        self.stretches = [
            (start, events[start : start + length]) for start in range(0, len(events), length)
        ]
        """The run, each with the number of its first event."""
        self.body = events[cycle.start :] if cycle is not None else ()
        """The step that recurs."""
        self._places: tuple[_Place, ...] = ()
        self._is_asked_again = False

    def follow(self, capacity_bytes: int | None, *, max_cycles: int) -> tuple[Any, Followed]:
        """The allocator as the run leaves it on such a card, and how far it came."""
        card = self._begun(capacity_bytes, max_cycles)
        # Who asks what is reached with room goes on to cards with less.
        keeps = (self._is_asked_again or capacity_bytes is None) and not self.expandable
        self._is_asked_again = True
        while card.goes_on(max_cycles):
            card.advance()
            if keeps and card.followed.died_at is None:
                self._places = (*self._places, card.place())[-MOST_PLACES:]
        return card.allocator, card.followed

    def _begun(self, capacity_bytes: int | None, max_cycles: int) -> "_Card":
        """At the last place that such a card comes to."""
        kind: Any = ExpandableAllocator if self.expandable else CachingAllocator
        allocator = kind(capacity_bytes)
        leading = [each for each in self._places if each.leads(allocator.capacity, max_cycles)]
        if not leading:
            return _Card(self, allocator, allocator.blocks_in_use(), Followed())
        place = max(leading, key=_advance)
        # What was gone on from is the latest.
        self._places = (*(each for each in self._places if each is not place), place)
        return _Card(self, allocator, allocator.resume(place.state, place.blocks), place.followed)


class _Card:
    """A run on one card."""

    __slots__ = ("allocator", "blocks", "followed", "run")

    def __init__(
        self, run: PythonRun, allocator: Any, blocks: dict[int, Any], followed: Followed
    ) -> None:
        self.run = run
        self.allocator = allocator
        self.blocks = blocks
        self.followed = followed

    def goes_on(self, max_cycles: int) -> bool:
        """Whether there is more to follow."""
        run, followed = self.run, self.followed
        if followed.died_at is not None or followed.is_settled:
            return False
        if followed.stretches < len(run.stretches):
            return True
        return run.cycle is not None and followed.num_cycles < max_cycles

    def advance(self) -> None:
        """One stretch further, or one step."""
        run, followed = self.run, self.followed
        if followed.stretches == len(run.stretches):
            assert run.cycle is not None, "else there is no more to follow"
            self.followed = self._again(run.cycle)
            return
        start, events = run.stretches[followed.stretches]
        died_at = self._follow(events, start)
        self.followed = followed._replace(stretches=followed.stretches + 1, died_at=died_at)

    def place(self) -> _Place:
        """Where it is, for others to go on from."""
        allocator = self.allocator
        return _Place(
            followed=self.followed,
            state=allocator.saved(),
            blocks=dict(self.blocks),
            least=allocator.peak_reserved,
            lacked=allocator.lacked,
        )

    def _again(self, cycle: Cycle) -> Followed:
        """The step once more: it lets go what the one before it left, as the list says it."""
        allocator, blocks = self.allocator, self.blocks
        followed = self.followed
        if followed.kept is None:
            followed = followed._replace(kept=self._picture(cycle))
        for number in [each for each in blocks if each >= cycle.start]:
            blocks[number - cycle.start + cycle.before] = blocks.pop(number)
        before = allocator.num_flushes
        died_at = self._follow(self.run.body, cycle.start)
        followed = followed._replace(
            died_at=died_at,
            num_cycles=followed.num_cycles + 1,
            flushes=allocator.num_flushes > before,
        )
        if died_at is not None:
            return followed
        now = self._picture(cycle)
        if now.is_like(followed.kept):
            return followed._replace(is_settled=True)
        # States may come back after several steps (Brent's way to find a cycle).
        if followed.num_cycles == followed.until:
            return followed._replace(kept=now, until=2 * followed.until)
        return followed

    def _follow(self, events: Sequence[int], start: int) -> int | None:
        found: int | None = self.allocator.follow(events, start, self.run.streams, self.blocks)
        return found

    def _picture(self, cycle: Cycle) -> "_Picture":
        return _Picture(self.allocator, self.blocks, cycle.start)


class _Picture:
    """What there is when a step is over, drawn only where a look at it does not tell it from another."""

    __slots__ = ("_draw", "_drawn", "_look", "_start")

    def __init__(self, allocator: Any, blocks: dict[int, Any], start: int) -> None:
        self._look = allocator.look()
        self._draw: Picture = allocator.taken_down(blocks)
        self._start = start
        self._drawn: object = None

    def is_like(self, other: "_Picture | None") -> bool:
        """Whether all is the same that later decisions depend on."""
        if other is None or self._look != other._look:
            return False
        return self.drawn == other.drawn

    @property
    def drawn(self) -> object:
        """All of it."""
        if self._drawn is None:
            self._drawn = self._draw(self._name)
        return self._drawn

    def _name(self, number: int) -> int:
        return number - self._start if number >= self._start else LASTING


def _advance(place: _Place) -> tuple[int, int]:
    return place.followed.stretches, place.followed.num_cycles
