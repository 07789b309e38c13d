"""torch's caching allocator with ``expandable_segments:True``: pages are mapped where they are needed.

Each pool and stream has one range of addresses, into which pages of 2 MiB (small pool) or 20 MiB are
mapped as it grows, so that no segment is stranded. The rules are those of
c10/cuda/CUDACachingAllocator.cpp (torch 2.13; ``find_expandable_block``, ``map_block``,
``try_allocate_expandable_block``, ``unmap_block``).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from memplan.graph.core.tensors import ALLOCATION_ROUNDING, SMALL_REQUEST_BYTES
from memplan.memory.replaying.allocator import (
    EMPTY_CACHE,
    FREE,
    MEDIUM_SEGMENT_BYTES,
    ROOM,
    SMALL_SEGMENT_BYTES,
    STREAM_BITS,
    with_streams,
)

_UNIT = ALLOCATION_ROUNDING
_ENDLESS = 1 << 96
_Key = tuple[int, int]


class Block:
    """A stretch of a range: in use, free and mapped, or unmapped."""

    __slots__ = ("address", "after", "before", "mapped", "size", "used")

    def __init__(self, address: int, size: int, *, mapped: bool) -> None:
        self.address = address
        self.size = size
        self.mapped = mapped
        self.used = False
        self.before: Block | None = None
        self.after: Block | None = None


class Range:
    """The addresses of one pool and stream."""

    def __init__(self, page: int) -> None:
        self.page = page
        tail = Block(0, _ENDLESS, mapped=False)
        self.first = tail
        """The lowest one, into which those after it are joined."""
        self.free: list[_Key] = []
        """Free mapped blocks by size and address."""
        self.at: dict[int, Block] = {}
        """Free mapped blocks by address."""
        self.unmapped: dict[int, Block] = {0: tail}

    def blocks(self) -> Iterator[Block]:
        """All of it, in the order of addresses."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.after

    def laid(self, blocks: Sequence[tuple[int, bool, int | None]]) -> Iterator[tuple[Block, int]]:
        """Lay these blocks, of all of it; those that are in use, with their numbers."""
        self.unmapped.clear()
        before, address = None, 0
        for size, mapped, number in blocks:
            block = Block(address, size, mapped=mapped)
            address += size
            if before is None:
                self.first = block
            else:
                _insert_after(before, block)
            before = block
            if number is not None:
                block.used = True
                yield block, number
            elif mapped:
                self.add(block)
            else:
                self.unmapped[block.address] = block

    def add(self, block: Block) -> None:
        """Note a free block."""
        insort(self.free, (block.size, block.address))
        self.at[block.address] = block

    def take(self, block: Block) -> None:
        """Forget a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.at[block.address]

    def fitting(self, size: int) -> Block | None:
        """The best fit, a block at an edge counting as large as it can grow."""
        free, at = self.free, self.at
        position = bisect_left(free, (size, -1))
        if position == len(free):
            return None
        block = at[free[position][1]]
        for _, address in free[position + 1 :]:
            other = at[address]
            if _growth(other) >= _growth(block):
                break
            block = other
        return block

    def growing(self, size: int) -> Block:
        """The lowest free or unmapped block from which there is room for the request."""
        for address in sorted(self.unmapped):
            block = self.unmapped[address]
            if block.before is not None and not block.before.used and block.before.mapped:
                block = block.before
            room = 0
            each: Block | None = block
            while each is not None and not each.used and room < size:
                room += each.size
                each = each.after
            if room >= size:
                return block
        msg = "the last block of a range is endless"
        raise AssertionError(msg)


def _range(key: _Key) -> Range:
    """An empty one, of the small or of the large pool."""
    is_small, _ = key
    page = SMALL_SEGMENT_BYTES if is_small else MEDIUM_SEGMENT_BYTES
    return Range(page // _UNIT)


def _growth(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


class SavedRanges(NamedTuple):
    """The allocator's state, but for the card's capacity and what was reached."""

    ranges: list[tuple[_Key, list[tuple[int, bool, int | None]]]]
    """The blocks of each, with the number of one in use."""
    counts: tuple[int, int]
    """What is reserved and allocated."""

    @property
    def look(self) -> object:
        """What states that are alike have in common, and others seldom do."""
        return self.counts

    def picture(self, name: Callable[[int], int]) -> object:
        """All that later decisions depend on: each range's blocks; ``name`` tells those in use apart."""
        return [
            [
                (size, mapped, FREE if number is None else name(number))
                for size, mapped, number in blocks
            ]
            for _, blocks in self.ranges
        ]


class ExpandableAllocator:
    """The allocator's state with expandable segments; sizes in units of ``ALLOCATION_ROUNDING``."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity = self.capacity_of(capacity_bytes)
        self.ranges: dict[_Key, Range] = {}
        self.reserved = self.allocated = 0
        self.peak_allocated = self.peak_reserved = 0
        self.num_mappings = self.num_flushes = 0
        self.lacked = ROOM
        """The least capacity with which something else would have happened."""
        self.pressed = 0
        """The most that was reserved with what the cache was given back for."""
        self._pressing = False

    @property
    def peak_requested(self) -> int:
        """What is handed out is what was asked for: every rest is split off."""
        return self.peak_allocated

    @property
    def num_mallocs(self) -> int:
        """Pages that were mapped."""
        return self.num_mappings

    def replay(self, events: Sequence[int], streams: Mapping[int, int] | None = None) -> int | None:
        """Follow events; return the number of the one at which memory runs out, None if it lasts.

        >>> ExpandableAllocator().replay([512, ~0])
        """
        return self.follow(with_streams(events, streams or {}), 0, self.blocks_in_use())

    def follow(
        self, events: Sequence[int], start: int, blocks: MutableMapping[int, tuple[Range, Block]]
    ) -> int | None:
        """Follow events with their streams of which the first is number ``start``, where ``blocks`` are handed out."""
        for number, event in enumerate(events, start):
            if event < 0:
                self._release(*blocks.pop(~event))
            elif event == EMPTY_CACHE:
                self.release_cached()
            else:
                stream = event >> STREAM_BITS
                size = event - (stream << STREAM_BITS)
                key = (size <= SMALL_REQUEST_BYTES, stream)
                found = self.ranges.get(key)
                if found is None:
                    found = self.ranges[key] = _range(key)
                block = self._allocate(found, (size + _UNIT - 1) // _UNIT)
                if block is None:
                    return number
                blocks[number] = found, block
        return None

    @staticmethod
    def capacity_of(capacity_bytes: int | None) -> int:
        """In units; None: of a card with room for everything."""
        return ROOM if capacity_bytes is None else capacity_bytes // _UNIT

    def begin(self, capacity: int) -> None:
        """Go on with a card of another capacity; what is reached is counted from here on."""
        self.capacity = capacity
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        self.num_mappings = self.num_flushes = self.pressed = 0
        self.lacked = ROOM

    def saved(self, blocks: Mapping[int, tuple[Range, Block]]) -> SavedRanges:
        """All that later decisions depend on, and the blocks that are handed out."""
        names = {id(block): number for number, (_, block) in blocks.items()}
        ranges = [
            (key, [(block.size, block.mapped, names.get(id(block))) for block in pool.blocks()])
            for key, pool in self.ranges.items()
        ]
        return SavedRanges(ranges, (self.reserved, self.allocated))

    def resume(self, saved: SavedRanges) -> dict[int, tuple[Range, Block]]:
        """Be in a state that was saved; return the blocks that were handed out then."""
        self.reserved, self.allocated = saved.counts
        self.ranges = {}
        in_use: dict[int, tuple[Range, Block]] = {}
        for key, blocks in saved.ranges:
            pool = self.ranges[key] = _range(key)
            for block, number in pool.laid(blocks):
                in_use[number] = pool, block
        return in_use

    def blocks_in_use(self) -> dict[int, tuple[Range, Block]]:
        """Blocks handed out, by the event that asked for them; who watches a replay has its own."""
        return {}

    def _allocate(self, pool: Range, size: int) -> Block | None:
        block = pool.fitting(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._grow(pool, size)
            if block is None:
                self.num_flushes += 1
                self.release_cached()
                self._pressing = True
                block = self._grow(pool, size)
                self._pressing = False
            if block is None:
                return None
        rest = block.size - size
        if rest:
            other = Block(block.address + size, rest, mapped=True)
            _insert_after(block, other)
            block.size = size
            pool.add(other)
        block.used = True
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _grow(self, pool: Range, size: int) -> Block | None:
        """``try_allocate_expandable_block``."""
        block = pool.growing(size)
        if not block.mapped:
            mapped = self._map(pool, block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            following = block.after
            assert following is not None
            mapped = self._map(pool, following, min(size - block.size, following.size))
            if mapped is None:
                return None
            block = mapped
        pool.take(block)
        return block

    def _map(self, pool: Range, block: Block, size: int) -> Block | None:
        """Map pages at the beginning of an unmapped block, and join it with its free neighbours."""
        page = pool.page
        end = -(-(block.address + size) // page) * page
        size = min(end - block.address, block.size)
        needed = self.reserved + size
        if needed > self.capacity:
            self.lacked = min(self.lacked, needed)
            return None
        self.num_mappings += size // page
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self._pressing:
            self.pressed = max(self.pressed, self.reserved)
        del pool.unmapped[block.address]
        if size < block.size:
            rest = Block(block.address + size, block.size - size, mapped=False)
            _insert_after(block, rest)
            pool.unmapped[rest.address] = rest
            block.size = size
        block.mapped = True
        return self._join(pool, block)

    def _join(self, pool: Range, block: Block) -> Block:
        """Join a free block with its free mapped neighbours."""
        before, after = block.before, block.after
        if before is not None and before.mapped and not before.used:
            pool.take(before)
            _absorb(before, block)
            block = before
        if after is not None and after.mapped and not after.used:
            pool.take(after)
            _absorb(block, after)
        pool.add(block)
        return block

    def _release(self, pool: Range, block: Block) -> None:
        self.allocated -= block.size
        block.used = False
        self._join(pool, block)

    def release_cached(self) -> None:
        """Unmap every whole page that lies in a free block."""
        for pool in self.ranges.values():
            for block in list(pool.at.values()):
                self._unmap(pool, block)

    def _unmap(self, pool: Range, block: Block) -> None:
        page = pool.page
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        pool.take(block)
        self.reserved -= end - start
        stop = block.address + block.size
        if stop > end:
            rest = Block(end, stop - end, mapped=True)
            _insert_after(block, rest)
            pool.add(rest)
        if block.address < start:
            middle = Block(start, end - start, mapped=False)
            _insert_after(block, middle)
            block.size = start - block.address
            pool.add(block)
            block = middle
        else:
            block.size = end - start
            block.mapped = False
        for near in (block.after, block.before):
            if near is not None and not near.mapped:
                del pool.unmapped[near.address]
                first, second = (block, near) if near is block.after else (near, block)
                _absorb(first, second)
                block = first
        pool.unmapped[block.address] = block


def _insert_after(block: Block, other: Block) -> None:
    other.before, other.after = block, block.after
    if block.after is not None:
        block.after.before = other
    block.after = other


def _absorb(block: Block, following: Block) -> None:
    block.size += following.size
    block.after = following.after
    if following.after is not None:
        following.after.before = block
