"""A repetition of a segment's pass as it was played, to be written down again where it finds the same.

Equal layers ask for the same blocks in the same order. The first of them is played block by block; what
it asked for between two acts of an engine is kept as a stretch, with numbers in the place of blocks, and
each one after it that is given the same writes these stretches down as a whole. What engines do is their own
and happens each time.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum

from memplan.fast_dataclass import dataclass, field, replace
from memplan.graph.core.tensors import Parameter, Tensor
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

    events: Sequence[int]
    """Bytes, or ``~n`` where the block of number ``n`` is freed."""
    made: Sequence[int]
    """Which of them allocate; their blocks' numbers follow those that are there."""
    streams: Sequence[tuple[int, int]]
    """Which of them are of another stream than the main one, and of which."""
    act: Act
    block: int | None
    """The number of the gradient that is handed over; None: one that waits has taken it up."""

    def write(self, ledger: Ledger, blocks: list[Block]) -> None:
        """Write the events down; ``blocks`` by their numbers, to which new ones are added."""
        if not self.events:
            return
        events = ledger.events
        start = len(events)
        if self.made:
            blocks += [start + each for each in self.made]
        events += [each if each > 0 else ~blocks[~each] for each in self.events]
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
    flow: int | None = None
    """The gradient of its input."""
    flow_is_view: bool = False
    shared: dict[Tensor, int] = field(default_factory=dict)
    """Gradients of what others read too."""

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
    stretches: Sequence[Stretch]
    left: Left
    """In numbers."""


class Notes:
    """What a repetition asks for while it is played."""

    __slots__ = ("_ledger", "_start", "_stretches", "is_alike")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._start = len(ledger.events)
        self._stretches: list[tuple[range, list[tuple[int, int]], Act, Block | None]] = []
        self.is_alike = True
        """Nothing has happened that goes by more than what is compared."""

    def stop(self, act: Act, block: Block | None = None) -> None:
        """Somebody else acts."""
        found, streams = range(self._start, len(self._ledger.events)), self._ledger.streams
        others = [(each - self._start, streams[each]) for each in found if each in streams]
        self._stretches.append((found, others, act, block))

    def go_on(self) -> None:
        """The pass goes on."""
        self._start = len(self._ledger.events)

    def script(self, standing: Hashable, given: Sequence[Block], left: Left) -> Script | None:
        """The whole of it; None where it may not be the same another time."""
        numbers = {block: number for number, block in enumerate(given)}
        if not self.is_alike or len(numbers) < len(given):
            return None
        try:
            stretches = [self._stretch(numbers, *each) for each in self._stretches]
            return Script(standing, stretches, left.numbered(numbers))
        except KeyError:
            return None  # a block of somebody else

    def _stretch(
        self,
        numbers: dict[Block, int],
        found: range,
        streams: list[tuple[int, int]],
        act: Act,
        block: Block | None,
    ) -> Stretch:
        events, made = list[int](), list[int]()
        for number in found:
            event = self._ledger.events[number]
            if event > 0:
                made.append(number - found.start)
                numbers[number] = len(numbers)
                events.append(event)
            else:
                events.append(~numbers[~event])
        return Stretch(events, made, streams, act, None if block is None else numbers[block])
