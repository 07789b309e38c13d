"""torch's caching allocator, replayed: what a card must really hold, and where a job dies.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13; ``get_free_block``, ``alloc_block``,
``should_split``, ``free_block``, ``release_cached_blocks``): a request is rounded up, served by the
smallest free block of its pool and stream that is large enough, and split where the rest is worth
keeping; freed neighbours of one segment join; where no segment can be had, all wholly free segments
are given back and it is tried once more.

Addresses are counted in units of ``ALLOCATION_ROUNDING`` and never used twice, which keeps their order.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import add, eq
from typing import NamedTuple

from memplan.graph.core.tensors import ALLOCATION_ROUNDING, SMALL_REQUEST_BYTES
from memplan.units import MIB, ceil_div

SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment of the small pool (``kSmallBuffer``)."""
MEDIUM_SEGMENT_BYTES = 20 * MIB
"""A segment of the large pool for a request below ``MEDIUM_REQUEST_BYTES`` (``kLargeBuffer``)."""
MEDIUM_REQUEST_BYTES = 10 * MIB
"""From here on a segment is made to measure (``kMinLargeAlloc``)."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""To which such a segment is rounded up (``kRoundLarge``)."""

_UNIT = ALLOCATION_ROUNDING
_SMALL = SMALL_REQUEST_BYTES // _UNIT
_SMALL_SEGMENT = SMALL_SEGMENT_BYTES // _UNIT
_MEDIUM_SEGMENT = MEDIUM_SEGMENT_BYTES // _UNIT
_MEDIUM_REQUEST = MEDIUM_REQUEST_BYTES // _UNIT
_ROUNDING = SEGMENT_ROUNDING_BYTES // _UNIT
_ADDRESS_BITS = 96
"""Bits of an address in a pool's keys, which sort by size and then by address. No address is used twice,
and a run may be one that no computer holds."""
_ADDRESSES = (1 << _ADDRESS_BITS) - 1
ROOM = _ADDRESSES
"""The capacity of a card with room for everything [units]."""

BlockInUse = tuple[int, int, int, list[int]]
"""A block's address, its size and the request it serves, and its pool's free blocks."""
Blocks = dict[int, BlockInUse]
"""Blocks handed out, by the event that asked for them."""
_Asked = tuple[int, int, int, list[int]]
"""What is asked for in units, the least key that serves it, a rest that is not split off, and its pool."""

EMPTY_CACHE = 0
"""The event ``torch.cuda.empty_cache()``."""
STREAM_BITS = 96
"""Above these an event says of which stream what it asks for is (``with_streams``)."""
_SIZES = (1 << STREAM_BITS) - 1


def with_streams(events: Sequence[int], streams: Mapping[int, int]) -> list[int]:
    """Events of which each that allocates says its stream.

    >>> with_streams([512, 512, ~0], {1: 3}) == [512, 3 << STREAM_BITS | 512, ~0]
    True
    """
    told = list(events)
    for number, stream in streams.items():
        if number < len(told):
            told[number] |= stream << STREAM_BITS
    return told


class CachingAllocator:
    """The allocator's state; default settings (``expandable_segments:False``)."""

    __slots__ = (
        "_allocated", "_at", "_before", "_next", "_pools", "_requested", "_reserved", "_segments",
        "capacity", "lacked", "num_flushes", "num_mallocs", "peak_allocated",
        "peak_requested", "peak_reserved", "pressed",
    )  # fmt: skip

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity = self.capacity_of(capacity_bytes)
        self._pools: dict[int, list[int]] = {}
        """Free blocks of each pool and stream as sorted ``size << bits | address``."""
        self._at: dict[int, int] = {}
        """Free blocks: address to size."""
        self._before: dict[int, int] = {}
        """Free blocks: the address where they end to their own."""
        self._segments: dict[int, int] = {}
        """Segments: address to size."""
        self._next = 0
        self._reserved = self._allocated = self._requested = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self.num_mallocs = self.num_flushes = 0
        self.lacked = ROOM
        """The least capacity with which something else would have happened."""
        self.pressed = 0
        """The most that was reserved with what the cache was given back for."""

    def replay(self, events: Sequence[int], streams: Mapping[int, int] | None = None) -> int | None:
        """Follow events; return the number of the one at which memory runs out, None if it lasts.

        Event number ``n`` allocates that many bytes where it is positive; ``~n``, negative, frees
        what event ``n`` allocated; ``EMPTY_CACHE`` is what it says. ``streams`` names the stream of
        an allocation where that is not 0.

        >>> CachingAllocator().replay([512, ~0])
        """
        return self.follow(with_streams(events, streams or {}), 0, self.blocks_in_use())

    def follow(
        self, events: Sequence[int], start: int, blocks: MutableMapping[int, BlockInUse]
    ) -> int | None:
        """Follow events with their streams of which the first is number ``start``, where ``blocks`` are handed out."""
        pools, at, before = self._pools, self._at, self._before
        asked: dict[int, _Asked] = {}
        requested, allocated = self._requested, self._allocated
        peak_requested, peak_allocated = self.peak_requested, self.peak_allocated
        died_at = None
        for number, event in enumerate(events, start):
            if event < 0:
                address, size, request, free = blocks.pop(~event)
                requested -= request
                allocated -= size
                end = address + size
                if end in at:
                    after = at.pop(end)
                    del free[bisect_left(free, after << _ADDRESS_BITS | end)]
                    end += after
                    size += after
                if address in before:
                    address = before.pop(address)
                    joined = at[address]
                    del free[bisect_left(free, joined << _ADDRESS_BITS | address)]
                    size += joined
                at[address] = size
                before[end] = address
                insort(free, size << _ADDRESS_BITS | address)
                continue
            found = asked.get(event)
            if found is None:
                if event == EMPTY_CACHE:
                    self.release_cached()
                    continue
                request = ((event & _SIZES) + _UNIT - 1) // _UNIT
                small = request <= _SMALL
                free = pools.setdefault(event >> STREAM_BITS << 1 | small, [])
                found = request, request << _ADDRESS_BITS, 0 if small else _SMALL, free
                asked[event] = found
            request, least, worthless, free = found
            position = bisect_left(free, least)
            if position < len(free):
                key = free.pop(position)
                size, address = key >> _ADDRESS_BITS, key & _ADDRESSES
                del at[address]
                end = address + size
            else:
                size = _segment_size(request)
                if not self._segment(size):
                    died_at = number
                    break
                address = self._next
                end = address + size
                # A gap, so that blocks of two segments never join.
                self._next = end + 1
            rest = size - request
            if rest > worthless:
                remainder = address + request
                at[remainder] = rest
                before[end] = remainder
                insort(free, rest << _ADDRESS_BITS | remainder)
                size = request
            else:
                before.pop(end, None)
            blocks[number] = (address, size, request, free)
            requested += request
            allocated += size
            if requested > peak_requested:  # noqa: PLR1730  (a call costs a tenth of the replay)
                peak_requested = requested
            if allocated > peak_allocated:  # noqa: PLR1730
                peak_allocated = allocated
        self._requested, self._allocated = requested, allocated
        self.peak_requested, self.peak_allocated = peak_requested, peak_allocated
        return died_at

    def blocks_in_use(self) -> "Blocks":
        """Blocks handed out, by the event that asked for them; who watches a replay has its own."""
        return {}

    @staticmethod
    def capacity_of(capacity_bytes: int | None) -> int:
        """In units; None: of a card with room for everything."""
        return ROOM if capacity_bytes is None else capacity_bytes // _UNIT

    def begin(self, capacity: int) -> None:
        """Go on with a card of another capacity; what is reached is counted from here on."""
        self.capacity = capacity
        self.peak_requested, self.peak_allocated = self._requested, self._allocated
        self.peak_reserved = self._reserved
        self.num_mallocs = self.num_flushes = self.pressed = 0
        self.lacked = ROOM

    def saved(self, blocks: "Blocks") -> "SavedState":
        """All that later decisions depend on, and the blocks that are handed out."""
        return SavedState(
            pools=[(key, free, free[:]) for key, free in self._pools.items()],
            places=(dict(self._at), dict(self._before), dict(self._segments)),
            counts=(self._next, self._reserved, self._allocated, self._requested),
            blocks=dict(blocks),
        )

    def resume(self, saved: "SavedState") -> "Blocks":
        """Be in a state that was saved; return the blocks that were handed out then."""
        self._pools = {key: kept[:] for key, _, kept in saved.pools}
        self._at, self._before, self._segments = map(dict, saved.places)
        self._next, self._reserved, self._allocated, self._requested = saved.counts
        own = {id(free): self._pools[key] for key, free, _ in saved.pools}
        return {
            number: (address, size, request, own[id(free)])
            for number, (address, size, request, free) in saved.blocks.items()
        }

    def _lacks(self, size: int) -> bool:
        """Whether so much more is more than there is; if so, with which capacity it would not be."""
        needed = self._reserved + size
        if needed <= self.capacity:
            return False
        self.lacked = min(self.lacked, needed)
        return True

    def _segment(self, size: int) -> bool:
        """Have a segment from the driver, giving back what is free where it cannot be had."""
        if self._lacks(size):
            self.num_flushes += 1
            self.release_cached()
            if self._lacks(size):
                return False
            self.pressed = max(self.pressed, self._reserved + size)
        self.num_mallocs += 1
        self._reserved += size
        self._segments[self._next] = size
        self.peak_reserved = max(self.peak_reserved, self._reserved)
        return True

    def release_cached(self) -> None:
        """Give back every segment that is wholly free (``release_cached_blocks``)."""
        segments = self._segments
        for free in self._pools.values():
            kept = []
            for key in free:
                address, size = key & _ADDRESSES, key >> _ADDRESS_BITS
                if segments.get(address) == size:
                    del segments[address], self._at[address], self._before[address + size]
                    self._reserved -= size
                else:
                    kept.append(key)
            free[:] = kept


FREE = -1
"""Stands for the name of a free block in a picture."""
_PlacedBlock = tuple[int, int, int]
"""Its address, its size, its name."""


class SavedState(NamedTuple):
    """Of an allocator, but for the card's capacity and what was reached."""

    pools: list[tuple[int, list[int], list[int]]]
    """Each pool's free blocks: the list that blocks in use name, and what was in it."""
    places: tuple[dict[int, int], dict[int, int], dict[int, int]]
    """Where free blocks and segments lie."""
    counts: tuple[int, int, int, int]
    """The next address, and what is reserved, allocated and requested."""
    blocks: Blocks

    @property
    def look(self) -> object:
        """What states that are alike have in common, and others seldom do."""
        return self.counts[1:], len(self.places[0])

    def picture(self, name: Callable[[int], int]) -> object:
        """All that later decisions depend on: each pool's blocks in the order of their addresses.

        ``name`` tells blocks in use apart. Where one does not begin where the one before it ends,
        another segment begins.
        """
        placed = {id(free): [_place(key) for key in kept] for _, free, kept in self.pools}
        for number, (address, size, _, free) in self.blocks.items():
            placed[id(free)].append((address, size, name(number)))
        return [_drawn(sorted(found)) for found in placed.values()]


def _place(key: int) -> _PlacedBlock:
    return key & _ADDRESSES, key >> _ADDRESS_BITS, FREE


def _drawn(blocks: list[_PlacedBlock]) -> object:
    """Their sizes and names, and whether each begins where the one before it ends."""
    if not blocks:
        return ()
    addresses, sizes, names = zip(*blocks, strict=True)
    return sizes, names, [*map(eq, addresses[1:], map(add, addresses, sizes))]


def _segment_size(request: int) -> int:
    """Of a new segment that a request is served from."""
    if request <= _SMALL:
        return _SMALL_SEGMENT
    if request < _MEDIUM_REQUEST:
        return _MEDIUM_SEGMENT
    return ceil_div(request, _ROUNDING) * _ROUNDING
