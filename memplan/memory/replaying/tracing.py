"""The allocator's replay, watched: every block and segment with its address, in torch's order.

The allocators are those of a plain replay; what they call at each step is overridden here, so that a
plain replay pays nothing for it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.replaying.allocator import SMALL_SEGMENT_BYTES, CachingAllocator
from memplan.memory.replaying.expandable import Block as Piece
from memplan.memory.replaying.expandable import ExpandableAllocator, Range
from memplan.memory.replaying.ledger import Block

_UNIT = ALLOCATION_ROUNDING
FIRST_ADDRESS = 0x7F00_0000_0000
"""Where segments begin: about where a process really sees them."""
NOBODY = -1
"""The block of an entry that no allocation is behind."""
RANGE_BYTES = 1 << 44
"""Between the ranges of addresses of two expandable pools."""


class Action(StrEnum):
    """What torch's allocator notes, in its words."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One thing that the allocator did."""

    action: Action
    address: int
    num_bytes: int
    """As asked for; a segment's own size."""
    stream: int
    block: Block
    """The allocation that it serves or frees, for which a segment came or went; or ``NOBODY``."""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A stretch of a segment at the end."""

    address: int
    num_bytes: int
    requested_bytes: int
    block: Block | None
    """Who uses it; None: it is free."""


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment that is reserved at the end, cut into blocks without a gap."""

    address: int
    num_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[PlacedBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorTrace:
    """A replay, step by step, and what it leaves reserved."""

    entries: tuple[TraceEntry, ...]
    segments: tuple[PlacedSegment, ...]
    died_at: int | None


def trace(
    events: Sequence[int],
    streams: dict[int, int],
    *,
    expandable: bool = False,
    capacity_bytes: int | None = None,
) -> AllocatorTrace:
    """Replay a run and note every step of it.

    >>> [entry.action.value for entry in trace([512, ~0], {}).entries]
    ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
    """
    kind = _TracedExpandable if expandable else _TracedCaching
    watched = kind(events, streams, capacity_bytes)
    died_at = watched.replay(events, streams)
    watched.settle(NOBODY if died_at is None else died_at)
    if died_at is not None:
        watched.note(Action.OOM, 0, events[died_at], died_at)
    return AllocatorTrace(
        entries=tuple(watched.entries), segments=tuple(watched.placed()), died_at=died_at
    )


class _Watch:
    """What both allocators note alike."""

    entries: list[TraceEntry]

    def watch(self, events: Sequence[int], streams: dict[int, int]) -> None:
        self.entries = []
        self.events = events
        self.streams = streams
        self.pending: list[tuple[Action, int, int, int | None]] = []
        """Segments that were asked for or given back on behalf of the allocation to come."""

    def note(
        self,
        action: Action,
        address: int,
        num_bytes: int,
        block: Block,
        stream: int | None = None,
    ) -> None:
        own = self.streams.get(block, 0) if stream is None else stream
        self.entries.append(TraceEntry(action, address, num_bytes, own, block))

    def ask(self, action: Action, address: int, num_bytes: int, stream: int | None = None) -> None:
        self.pending.append((action, address, num_bytes, stream))

    def settle(self, block: Block) -> None:
        for action, address, num_bytes, stream in self.pending:
            self.note(action, address, num_bytes, block, stream)
        self.pending.clear()

    def came(self, block: Block, found: Any) -> None:
        self.settle(block)
        self.note(Action.ALLOC, self.address_of(found), self.events[block], block)

    def went(self, block: Block, found: Any) -> None:
        # What is pending here is an emptied cache, which serves nobody.
        self.settle(NOBODY)
        for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            self.note(action, self.address_of(found), self.events[block], block)

    @abstractmethod
    def address_of(self, found: Any) -> int: ...


class _InUse(dict[int, Any]):
    """Blocks handed out, which tells when one comes or goes."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __setitem__(self, block: Block, found: Any) -> None:
        super().__setitem__(block, found)
        self.watch.came(block, found)

    def pop(self, block: Block) -> Any:  # type: ignore[override]
        found = super().pop(block)
        self.watch.went(block, found)
        return found


class _TracedCaching(CachingAllocator, _Watch):
    def __init__(
        self, events: Sequence[int], streams: dict[int, int], capacity_bytes: int | None
    ) -> None:
        super().__init__(capacity_bytes)
        self.watch(events, streams)
        self.in_use = _InUse(self)

    def blocks_in_use(self) -> _InUse:
        return self.in_use

    def address_of(self, found: Any) -> int:
        return _address(found[0])

    def _segment(self, size: int) -> bool:
        address = self._next
        had = super()._segment(size)
        if had:
            self.ask(Action.SEGMENT_ALLOC, _address(address), size * _UNIT)
        return had

    def release_cached(self) -> None:
        before = dict(self._segments)
        super().release_cached()
        streams = self.segment_streams()
        for address, size in before.items():
            if address not in self._segments:
                at = _address(address)
                self.ask(Action.SEGMENT_FREE, at, size * _UNIT, streams[at])

    def segment_streams(self) -> dict[int, int]:
        return {
            entry.address: entry.stream
            for entry in self.entries
            if entry.action is Action.SEGMENT_ALLOC
        }

    def placed(self) -> Iterator[PlacedSegment]:
        used = {found[0]: (number, found[1]) for number, found in self.in_use.items()}
        streams = self.segment_streams()
        for address, size in sorted(self._segments.items()):
            blocks = []
            at = address
            while at < address + size:
                number, length = used.get(at, (None, 0))
                length = length or self._at[at]
                asked = 0 if number is None else self.events[number]
                blocks.append(PlacedBlock(_address(at), length * _UNIT, asked, number))
                at += length
            yield PlacedSegment(
                address=_address(address),
                num_bytes=size * _UNIT,
                stream=streams[_address(address)],
                is_small=size * _UNIT == SMALL_SEGMENT_BYTES,
                is_expandable=False,
                blocks=tuple(blocks),
            )


def _address(units: int) -> int:
    return FIRST_ADDRESS + units * _UNIT


class _TracedExpandable(ExpandableAllocator, _Watch):
    def __init__(
        self, events: Sequence[int], streams: dict[int, int], capacity_bytes: int | None
    ) -> None:
        super().__init__(capacity_bytes)
        self.watch(events, streams)
        self.in_use = _InUse(self)

    def blocks_in_use(self) -> _InUse:
        return self.in_use

    def base_of(self, pool: Range) -> int:
        number = next(index for index, each in enumerate(self.ranges.values()) if each is pool)
        return FIRST_ADDRESS + number * RANGE_BYTES

    def address_of(self, found: Any) -> int:
        pool, piece = found
        address: int = piece.address * _UNIT
        return self.base_of(pool) + address

    def _map(self, pool: Range, block: Piece, size: int) -> Piece | None:
        start, before = block.address, self.reserved
        mapped = super()._map(pool, block, size)
        if mapped is not None:
            address = self.base_of(pool) + start * _UNIT
            self.ask(Action.SEGMENT_MAP, address, (self.reserved - before) * _UNIT)
        return mapped

    def _unmap(self, pool: Range, block: Piece) -> None:
        start = -(-block.address // pool.page) * pool.page
        before = self.reserved
        super()._unmap(pool, block)
        if before > self.reserved:
            address = self.base_of(pool) + start * _UNIT
            stream = next(key[1] for key, each in self.ranges.items() if each is pool)
            self.ask(Action.SEGMENT_UNMAP, address, (before - self.reserved) * _UNIT, stream)

    def placed(self) -> Iterator[PlacedSegment]:
        users = {id(piece): number for number, (_, piece) in self.in_use.items()}
        for (is_small, stream), pool in self.ranges.items():
            stretch: list[PlacedBlock] = []
            for piece in [*_pieces(pool), None]:
                if piece is not None and piece.mapped:
                    number = users.get(id(piece))
                    stretch.append(
                        PlacedBlock(
                            address=self.base_of(pool) + piece.address * _UNIT,
                            num_bytes=piece.size * _UNIT,
                            requested_bytes=0 if number is None else self.events[number],
                            block=number,
                        )
                    )
                elif stretch:
                    yield PlacedSegment(
                        address=stretch[0].address,
                        num_bytes=sum(each.num_bytes for each in stretch),
                        stream=stream,
                        is_small=bool(is_small),
                        is_expandable=True,
                        blocks=tuple(stretch),
                    )
                    stretch = []


def _pieces(pool: Range) -> Iterator[Piece]:
    """Every block of a range, in the order of addresses."""
    each: Piece | None = next(iter(pool.unmapped.values()))
    assert each is not None
    while each.before is not None:
        each = each.before
    while each is not None:
        yield each
        each = each.after
