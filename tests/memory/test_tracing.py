"""A watched replay is the plain one, and no two blocks share an address."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.memory.replaying.replay import replay
from memplan.memory.replaying.tracing import Action, AllocatorTrace, trace

MIB = 1 << 20


@st.composite
def runs(draw: Any) -> tuple[list[int], dict[int, int]]:
    """Allocations and frees in any order, now and then an emptied cache."""
    events: list[int] = []
    streams: dict[int, int] = {}
    alive: list[int] = []
    for step in draw(st.lists(st.integers(0, 9), max_size=60)):
        if step < 4 and alive:
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
        elif step == 9:
            events.append(0)
        else:
            stream = draw(st.sampled_from((0, 0, 0, 1)))
            if stream:
                streams[len(events)] = stream
            alive.append(len(events))
            events.append(draw(st.sampled_from((1, 512, 4000, MIB, MIB + 1, 3 * MIB, 30 * MIB))))
    return events, streams


def levels(found: AllocatorTrace) -> int:
    """The most that is reserved; on the way, blocks must lie apart and in a segment."""
    blocks: dict[int, int] = {}
    reserved = highest = 0
    for entry in found.entries:
        match entry.action:
            case Action.SEGMENT_ALLOC | Action.SEGMENT_MAP:
                reserved += entry.num_bytes
                highest = max(highest, reserved)
            case Action.SEGMENT_FREE | Action.SEGMENT_UNMAP:
                reserved -= entry.num_bytes
            case Action.ALLOC:
                end = entry.address + entry.num_bytes
                assert not [
                    start for start, stop in blocks.items()
                    if start < end and entry.address < stop
                ]  # fmt: skip
                blocks[entry.address] = end
            case Action.FREE_COMPLETED:
                del blocks[entry.address]
            case _:
                pass
    assert reserved == sum(segment.num_bytes for segment in found.segments)
    used = [
        block.address
        for segment in found.segments
        for block in segment.blocks
        if block.block is not None
    ]
    assert sorted(used) == sorted(blocks)
    for segment in found.segments:
        assert segment.num_bytes == sum(block.num_bytes for block in segment.blocks)
    return highest


@given(runs())
def test_a_watched_replay_is_the_plain_one(run: tuple[list[int], dict[int, int]]):
    events, streams = run
    assert levels(trace(events, streams)) == replay(events, streams).reserved_bytes
    expandable = trace(events, streams, expandable=True)
    assert levels(expandable) == replay(events, streams, expandable=True).reserved_bytes


@given(runs(), st.integers(1, 60))
def test_a_watched_replay_dies_where_the_plain_one_does(
    run: tuple[list[int], dict[int, int]], mib: int
):
    events, streams = run
    found = trace(events, streams, capacity_bytes=mib * MIB)
    plain = replay(events, streams, capacity_bytes=mib * MIB)
    assert found.died_at == plain.died_at
    assert levels(found) == plain.reserved_bytes
    last = found.entries[-1].action if found.entries else None
    assert (last is Action.OOM) == (plain.died_at is not None)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_freed_block_serves_the_next_request(expandable: bool):
    found = trace([3 * MIB, ~0, 3 * MIB], {}, expandable=expandable)
    addresses = {entry.address for entry in found.entries if entry.action is Action.ALLOC}
    assert len(addresses) == 1
