"""The ledger: every block that a run asks the allocator for or gives back, in torch's order.

An event is an integer, as ``memplan.memory.replaying.allocator`` reads them: a positive one allocates so many
bytes, ``~n`` frees what event ``n`` allocated.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from memplan.graph.core.segments import Segment
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.allocator import EMPTY_CACHE
from memplan.training.splitting.exchange import ALONE, ExchangeKind, Hiding, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Block = int
"""The number of the event that allocated it."""


class Part(StrEnum):
    """What a run does at a time."""

    LOAD = "load"
    FIRST_STEP = "first step"
    """All of it, where it is fuller than a later one; a ledger that plays a run out has its parts."""
    GENERATION = "generation"
    """Completions are generated and scored before they are trained on."""
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    OVERFLOW = "overflow"
    """What a step of fp16 begins with under stage 3 of ZeRO; a ledger that plays a run out counts it
    among the step."""
    EVALUATION = "evaluation"
    """Between steps."""
    SAVE = "save"
    """Writing a checkpoint; no step of a run."""


class Cycle(NamedTuple):
    """The last step of a run, which recurs: what it leaves behind, its copy frees."""

    before: int
    """The event at which the step before it begins."""
    start: int
    """The event at which it begins itself."""


def cycle_of(
    events: "Sequence[int]", streams: "Mapping[int, int]", before: int, start: int
) -> Cycle | None:
    """The cycle that the step from ``start`` on is; None: later ones are not like it.

    They are where it frees what it made itself, and all that the step before it left of what it leaves
    too, which is where that step made it.

    >>> cycle_of([512, 512, 512, ~1], {}, 1, 2)
    Cycle(before=1, start=2)
    """
    step = events[start:]
    freed = [~event for event in step if event < 0]
    of_others = [number for number in freed if number < start]
    num_made = len(step) - len(freed) - step.count(EMPTY_CACHE)
    num_left = num_made - (len(freed) - len(of_others))
    if num_left != len(of_others):
        return None
    let_go = set(freed) if of_others else ()
    for number in of_others:
        twin = number - before + start
        if number < before or twin >= len(events) or twin in let_go:
            return None
        if events[twin] != events[number] or streams.get(twin) != streams.get(number):
            return None
    return Cycle(before, start)


FIRST_STAND_IN = 1 << 62
"""From here on an event's bytes are the number of a size (``memplan.memory.shapes``): no block is as large."""


def with_sizes(events: "Iterable[int]", sizes: "Sequence[int]") -> list[int]:
    """Events with sizes in their stand-ins' place.

    >>> with_sizes([FIRST_STAND_IN + 1, 512, ~0], [1024, 2048])
    [2048, 512, -1]
    """
    return [sizes[each - FIRST_STAND_IN] if each >= FIRST_STAND_IN else each for each in events]


class Ledger:
    """Events of a run, played out."""

    __slots__ = ("cycle", "events", "steps", "streams")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        """Streams of the allocations on another than the main one."""
        self.steps: list[int] = []
        """Where each step begins."""
        self.cycle: Cycle | None = None
        """The last step, where all later ones are like it."""

    def enter(self, part: Part, step: int = 0) -> None:
        """A part of the run begins; only ``NamedLedger`` takes note."""

    def begin_step(self) -> None:
        """A step begins."""
        self.steps.append(len(self.events))

    def recurs(self) -> bool:
        """Whether the step that has ended is as all later ones will be; if so, it is the ``cycle``."""
        if len(self.steps) > 1:
            self.cycle = cycle_of(self.events, self.streams, *self.steps[-2:])
        return self.cycle is not None

    def begin_pass(self, number: int) -> None:
        """A pass of a pipeline's step is next; only ``Tally`` takes note."""

    @property
    def repeats(self) -> bool:
        """Whether a repetition is told from its events alone, and so may be written down as another was."""
        return True

    @property
    def shares_formats(self) -> bool:
        """Whether what is found is for all formats of a width, what only one of them does apart."""
        return False

    def standing(self) -> object:
        """What is held, to be compared with another time; None where each event counts by itself."""
        return None

    def begin_aside(self, part: Part) -> None:
        """What only some runs do; ``end_aside`` is to follow."""

    def end_aside(self) -> None:
        """All of them go on."""

    def reach(self, segment: Segment, repetition: int) -> None:
        """A segment of the model is reached; only ``NamedLedger`` takes note."""

    def frame(self) -> dict[object, Block]:
        """Where a walk's keys and their blocks are kept."""
        return {}

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,
        kind: ComponentKind | None = None,  # noqa: ARG002
        name: object = None,  # noqa: ARG002
    ) -> Block:
        """Ask for a block. What it is for, only ``NamedLedger`` notes: a walk's key says it too."""
        events = self.events
        number = len(events)
        events.append(num_bytes)
        if stream:
            self.streams[number] = stream
        return number

    def allocate_all(
        self, sizes: "Sequence[tuple[int, object]]", kind: ComponentKind
    ) -> list[Block]:
        """Ask for blocks of these sizes, each with its name."""
        return [self.allocate(size, 0, kind, name) for size, name in sizes]

    def free_all(self, blocks: "Iterable[Block]") -> None:
        """Give blocks back, the first one first."""
        self.events += [~block for block in blocks]

    def move(self, block: Block, stream: int) -> None:
        """Let a block be of another stream than the main one, before anything else is asked for."""
        if stream:
            self.streams[block] = stream

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.events.append(~block)

    def use(
        self,
        *sizes: int,
        stream: int = 0,
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> None:
        """Ask for blocks that are all given back at once, the last one first."""
        blocks = [self.allocate(size, stream, kind, name) for size in sizes]
        for block in reversed(blocks):
            self.free(block)

    def use_in_turn(
        self,
        sizes: "Iterable[int]",
        *,
        stream: int = 0,
        kind: ComponentKind,
        name: object,
        left_bytes: int = 0,
    ) -> list[Block]:
        """Ask for blocks of these sizes, each given back before the next; what is made of each, of ``left_bytes``, is
        returned."""
        left: list[Block] = []
        for size in sizes:
            block = self.allocate(size, stream, kind, name)
            if left_bytes:
                left.append(self.allocate(left_bytes, stream, kind, name))
            self.free(block)
        return left

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``."""
        self.events.append(EMPTY_CACHE)

    def exchange(
        self,
        kind: ExchangeKind,
        num_bytes: int,
        ranks: Ranks = ALONE,
        hiding: Hiding = Hiding.NONE,
    ) -> None:
        """Something is sent, fetched or copied; only ``Tally`` takes note."""
