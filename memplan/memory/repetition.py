"""A repetition of a segment's pass as it was played, to be written down again where it finds the same.

Equal layers ask for the same blocks in the same order. The first of them is played block by block; what
it asked for between two acts of an engine is kept as a stretch, with numbers in the place of blocks, and
each one after it that is given the same writes these stretches down as a whole. What engines do is their own
and happens each time.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from operator import inv, itemgetter

from memplan.fast_dataclass import dataclass, field, replace
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.memory.replaying.ledger import Block, Ledger


class ActKind(Enum):
    """What happens behind a stretch."""

    NONE = "none"
    """The repetition is over."""
    REACH = "reach"
    """An engine is at one of its stops."""
    GRADIENT = "gradient"
    """A gradient is handed over."""
    AFTER = "after"
    """An engine is told that the pass is over."""


@dataclass(frozen=True, slots=True)
class Act:
    """What happens behind a stretch."""

    kind: ActKind
    stop: int = 0
    """The number of the engine's stop."""
    parameter: Parameter | None = None
    """Whose gradient is handed over."""
    is_own: bool = False
    """It is a parameter of the segment, of which each repetition has one."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events between two acts."""

    events: Callable[[list[int]], Sequence[int]] | None
    """Takes them out of what there is to take them from (``Script.begun``); None: there are none."""
    made: Sequence[int]
    """Which of them allocate: what frees their blocks follows what is there."""
    streams: Sequence[tuple[int, int]]
    """Which of them are of another stream than the main one, and of which."""
    act: Act
    block: int | None
    """The number of the gradient that is handed over; None: one that waits has taken it up."""

    def write(self, ledger: Ledger, there: list[int]) -> None:
        """Write the events down, and add what frees their blocks to what is ``there``."""
        if self.events is None:
            return
        events = ledger.events
        start = len(events)
        if self.made:
            there += [~start - each for each in self.made]
        events += self.events(there)
        for each, stream in self.streams:
            ledger.streams[start + each] = stream


@dataclass(kw_only=True, slots=True)
class Left:
    """What a repetition leaves, be it in blocks or in their numbers."""

    frame: dict[object, int]
    """In its frame."""
    transit: list[int]
    """On its way to CPU RAM or back."""
    taken: Sequence[object]
    """Of what it is given, what is gone."""
    casts: Sequence[object] = ()
    """Of its frame, what autocast's cache alone holds."""
    flow: int | None = None
    """The gradient of its input."""
    flow_is_view: bool = False
    shared: dict[Tensor, int] = field(default_factory=dict)
    """Gradients of what others read too."""
    unkept: Sequence[Storage] = ()
    """What earlier segments made, and is kept by one fewer."""

    def numbered(self, numbers: Mapping[Block, int]) -> "Left":
        """The same in numbers. Raises ``KeyError`` for a block that has none."""
        return replace(
            self,
            frame={key: numbers[each] for key, each in self.frame.items()},
            transit=[numbers[each] for each in self.transit],
            flow=None if self.flow is None else numbers[self.flow],
            shared={key: numbers[each] for key, each in self.shared.items()},
        )


@dataclass(frozen=True, slots=True)
class Script:
    """A repetition as it was played."""

    standing: Hashable
    """All that decides what happens in it."""
    sizes: Sequence[int]
    """Of all blocks that it asks for, each once [bytes]."""
    stretches: Sequence[Stretch]
    left: Left
    """In numbers."""
    taker: Callable[[list[int]], Sequence[int]] | None
    """Takes the blocks of its frame out of what there is."""

    def frame(self, there: list[int]) -> Iterable[tuple[object, Block]]:
        """What it leaves in its frame, of what there is."""
        taken = self.taker(there) if self.taker is not None else ()
        return zip(self.left.frame, map(inv, taken), strict=True)

    def begun(self, given: Sequence[Block]) -> list[int]:
        """What its events are taken from, by their numbers: sizes, and what frees the blocks that it is given."""
        return [*self.sizes, *[~block for block in given]]


class Notes:
    """What a repetition asks for while it is played."""

    __slots__ = ("_ledger", "_start", "_stretches", "is_alike", "unkept")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._start = len(ledger.events)
        self._stretches: list[tuple[range, list[tuple[int, int]], Act, Block | None]] = []
        self.is_alike = True
        """Nothing has happened that goes by more than what is compared."""
        self.unkept: Sequence[Storage] = ()
        """What earlier segments made and the segment has let go of meanwhile."""

    @classmethod
    def of(cls, ledger: Ledger, spans: Iterable[range]) -> "Notes":
        """Those of what is written already, a stretch for each span of events."""
        notes = cls(ledger)
        for span in spans:
            notes._take(span, Act(ActKind.NONE), None)
        return notes

    def stop(self, act: Act, block: Block | None = None) -> None:
        """Somebody else acts."""
        self._take(range(self._start, len(self._ledger.events)), act, block)

    def _take(self, found: range, act: Act, block: Block | None) -> None:
        streams = self._ledger.streams
        others = [(each - found.start, streams[each]) for each in found if each in streams]
        self._stretches.append((found, others, act, block))

    def go_on(self) -> None:
        """The pass goes on."""
        self._start = len(self._ledger.events)

    def script(self, standing: Hashable, given: Sequence[Block], left: Left) -> Script | None:
        """The whole of it; None where it may not be the same another time."""
        events = self._ledger.events
        found = (events[each.start : each.stop] for each, *_ in self._stretches)
        asked = dict.fromkeys(event for each in found for event in each if event >= 0)
        sizes = {size: number for number, size in enumerate(asked)}
        numbers = {block: number for number, block in enumerate(given, len(sizes))}
        if not self.is_alike or len(numbers) < len(given):
            return None
        try:
            stretches = [self._stretch(sizes, numbers, *each) for each in self._stretches]
            told = left.numbered(numbers)
            taker = _taker([*told.frame.values()])
            return Script(standing, [*sizes], stretches, told, taker)
        except KeyError:
            return None  # a block of somebody else

    def _stretch(
        self,
        sizes: dict[int, int],
        numbers: dict[Block, int],
        found: range,
        streams: list[tuple[int, int]],
        act: Act,
        block: Block | None,
    ) -> Stretch:
        events = self._ledger.events[found.start : found.stop]
        made = [each for each, event in enumerate(events) if event > 0]
        first = len(sizes) + len(numbers)
        numbers |= {found.start + each: number for number, each in enumerate(made, first)}
        places = [sizes[event] if event >= 0 else numbers[~event] for event in events]
        at = None if block is None else numbers[block]
        return Stretch(_taker(places), made, streams, act, at)


def _taker(places: list[int]) -> Callable[[list[int]], Sequence[int]] | None:
    """Takes what is at these places out of a list."""
    if not places:
        return None
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
