"""The ledger: every block that a run asks the allocator for or gives back, in torch's order.

An event is an integer, as ``memplan.memory.allocator`` reads them: a positive one allocates so many
bytes, ``~n`` frees what event ``n`` allocated.
"""

from enum import StrEnum
from typing import TYPE_CHECKING

from memplan.graph.segments import Segment
from memplan.memory.account import ComponentKind
from memplan.memory.allocator import EMPTY_CACHE
from memplan.training.exchange import ALONE, ExchangeKind, Hiding, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class Ledger:
    """Events of a run, played out."""

    __slots__ = ("events", "repeats", "streams")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        """Streams of the allocations on another than the main one."""
        self.repeats: list[int] = []
        """Events from which on the same is done as just before, up to the next of them."""

    def enter(self, part: Part, step: int = 0) -> None:
        """A part of the run begins; only ``NamedLedger`` takes note."""

    def repeat(self, start: int) -> bool:
        """Do all once more that was done from an event on; False where that cannot be said.

        It cannot where blocks from before that event were given back, which are there no more.
        """
        stop = len(self.events)
        length = stop - start
        again = []
        for event in self.events[start:stop]:
            if event >= 0:
                again.append(event)
            elif ~event >= start:
                again.append(event - length)
            else:
                return False
        self.events += again
        streams = self.streams.items()
        self.streams |= {number + length: each for number, each in streams if number >= start}
        self.repeats.append(stop)
        return True

    def begin_pass(self, number: int) -> None:
        """A pass of a pipeline's step is next; only ``Tally`` takes note."""

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
        for block in blocks:
            self.free(block)

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
        self, sizes: "Iterable[int]", *, stream: int = 0, kind: ComponentKind, name: object
    ) -> None:
        """Ask for blocks of these sizes, each given back before the next."""
        for size in sizes:
            self.use(size, stream=stream, kind=kind, name=name)

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
