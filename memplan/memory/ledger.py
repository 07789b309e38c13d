"""The ledger: every block that a run asks the allocator for or gives back, in torch's order.

An event is an integer, as ``memplan.memory.allocator`` reads them: a positive one allocates so many
bytes, ``~n`` frees what event ``n`` allocated.
"""

from memplan.memory.allocator import EMPTY_CACHE

Block = int
"""The number of the event that allocated it."""


class Ledger:
    """Events of a run, played out."""

    __slots__ = ("events", "streams")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        """Streams of the allocations on another than the main one."""

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Ask for a block."""
        events = self.events
        number = len(events)
        events.append(num_bytes)
        if stream:
            self.streams[number] = stream
        return number

    def move(self, block: Block, stream: int) -> None:
        """Let a block be of another stream than the main one, before anything else is asked for."""
        if stream:
            self.streams[block] = stream

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.events.append(~block)

    def use(self, *sizes: int, stream: int = 0) -> None:
        """Ask for blocks that are all given back at once, the last one first."""
        blocks = [self.allocate(size, stream) for size in sizes]
        for block in reversed(blocks):
            self.free(block)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``."""
        self.events.append(EMPTY_CACHE)
