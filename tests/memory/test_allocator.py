"""The caching allocator's rules, by hand and against every recorded run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.memory.replaying.allocator import CachingAllocator
from memplan.memory.replaying.expandable import ExpandableAllocator
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.replaying.replay import AllocatorPeaks, Replayer, floor_bytes, replay
from memplan.units import KIB, MIB
from tests.memory.capacities import bisected


def run(*events: int) -> list[int]:
    return list(events)


class TestSegments:
    def test_a_small_request_takes_a_segment_of_two_mib(self):
        assert replay(run(1)).reserved_bytes == 2 * MIB

    def test_a_medium_request_takes_a_segment_of_twenty_mib(self):
        assert replay(run(MIB + 1)).reserved_bytes == 20 * MIB

    def test_a_large_request_is_rounded_up_to_two_mib(self):
        assert replay(run(10 * MIB + 1)).reserved_bytes == 12 * MIB

    def test_a_rest_of_a_mib_or_less_stays_inside_the_block(self):
        peaks = replay(run(25 * MIB))
        assert (peaks.requested_bytes, peaks.allocated_bytes) == (25 * MIB, 26 * MIB)

    def test_a_larger_rest_serves_the_next_request(self):
        assert replay(run(3 * MIB, 4 * MIB)).num_mallocs == 1

    def test_pools_of_two_streams_do_not_share(self):
        assert replay([3 * MIB, 4 * MIB], {1: 1}).reserved_bytes == 40 * MIB

    def test_freed_neighbours_join(self):
        events = run(3 * MIB, 3 * MIB, 14 * MIB, ~0, ~1, 6 * MIB)
        assert replay(events).num_mallocs == 1

    def test_blocks_of_two_segments_do_not_join(self):
        events = run(30 * MIB, 30 * MIB, ~0, ~1, 60 * MIB)
        assert replay(events).reserved_bytes == 120 * MIB

    def test_the_smallest_free_block_that_is_large_enough_is_taken(self):
        events = run(40 * MIB, 30 * MIB, ~0, ~1, 30 * MIB, 40 * MIB)
        assert replay(events).num_mallocs == 2


class TestCapacity:
    EVENTS = run(30 * MIB, ~0, 40 * MIB)

    def test_free_segments_are_given_back_first(self):
        peaks = replay(self.EVENTS, capacity_bytes=40 * MIB)
        assert (peaks.died_at, peaks.num_flushes) == (None, 1)

    def test_then_the_job_dies_at_the_request(self):
        assert replay(self.EVENTS, capacity_bytes=38 * MIB).died_at == 2

    def test_a_segment_in_use_is_not_given_back(self):
        events = run(30 * MIB, 2 * MIB, ~0, 20 * MIB)
        assert replay(events, capacity_bytes=50 * MIB).died_at is None
        assert replay([3 * MIB, 4 * MIB, ~0, 30 * MIB], capacity_bytes=40 * MIB).died_at == 3

    def test_the_least_capacity_is_what_must_be_there_at_once(self):
        assert floor_bytes(Replayer(self.EVENTS).on_card) == 40 * MIB

    def test_emptying_the_cache_gives_free_segments_back(self):
        ledger = Ledger()
        ledger.free(ledger.allocate(30 * MIB))
        ledger.empty_cache()
        ledger.allocate(40 * MIB)
        assert replay(ledger.events).reserved_bytes == 40 * MIB


def replay_expandable(events: list[int], **options: Any) -> AllocatorPeaks:
    return replay(events, expandable=True, **options)


class TestExpandable:
    def test_pages_are_mapped_as_they_are_needed(self):
        assert replay_expandable(run(30 * MIB)).reserved_bytes == 40 * MIB
        assert replay_expandable(run(100 * KIB)).reserved_bytes == 2 * MIB

    def test_no_segment_is_stranded(self):
        events = run(30 * MIB, 30 * MIB, ~0, ~1, 60 * MIB)
        assert replay_expandable(events).reserved_bytes == 60 * MIB

    def test_whole_pages_of_free_blocks_are_unmapped_where_memory_is_short(self):
        events = run(60 * MIB, 20 * MIB, ~0, 80 * MIB)
        peaks = replay_expandable(events, capacity_bytes=100 * MIB)
        assert (peaks.died_at, peaks.num_flushes) == (None, 1)
        assert replay_expandable(events, capacity_bytes=98 * MIB).died_at == 3


@st.composite
def runs(draw: st.DrawFn) -> list[int]:
    events: list[int] = []
    alive: list[int] = []
    for _ in range(draw(st.integers(1, 60))):
        if alive and draw(st.booleans()):
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            alive.append(len(events))
            events.append(draw(st.integers(1, 64 * MIB)))
    return events


@given(runs())
def test_what_is_reserved_holds_what_is_allocated_which_holds_what_is_asked_for(events: list[int]):
    for peaks in (replay(events), replay_expandable(events)):
        assert peaks.requested_bytes <= peaks.allocated_bytes <= peaks.reserved_bytes


@given(runs())
def test_with_what_is_reserved_every_run_completes(events: list[int]):
    assert CachingAllocator(replay(events).reserved_bytes).replay(events) is None
    assert ExpandableAllocator(replay_expandable(events).reserved_bytes).replay(events) is None


@given(runs())
def test_the_least_capacity_is_enough_and_any_larger_one_too(events: list[int]):
    run = Replayer(events)
    floor = floor_bytes(run.on_card)
    reserved = replay(events).reserved_bytes
    for capacity in range(floor, reserved + 1, 2 * MIB):
        assert CachingAllocator(capacity).replay(events) is None
    if floor:
        assert CachingAllocator(floor - 2 * MIB).replay(events) is not None


def read_trace(path: Path) -> tuple[list[int], dict[int, int]]:
    """A recorded run as the ledger writes it."""
    events: list[int] = []
    numbers: dict[int, int] = {}
    streams: dict[int, int] = {}
    known: dict[int, int] = {0: 0}
    with gzip.open(path, "rt") as file:
        for event in json.load(file):
            if event == ["empty_cache"]:
                events.append(0)
            elif len(event) == 1:
                events.append(~numbers.pop(event[0]))
            else:
                numbers[event[0]] = len(events)
                if event[2]:
                    streams[len(events)] = known.setdefault(event[2], len(known))
                events.append(max(event[1], 1))
    return events, streams


@pytest.mark.reference
def test_recorded_runs(reference_dir: Path):
    checked = 0
    for line in (reference_dir / "allocator.jsonl").read_text().splitlines():
        record = json.loads(line)
        real = record["real"]
        if "trace" not in record or real.get("events", 0) > 9_000:
            continue
        events, streams = read_trace(reference_dir / record["trace"])
        peaks = replay(events, streams)
        assert peaks.reserved_bytes == real["reserved_peak"], record["id"]
        assert peaks.num_mallocs == real["mallocs"], record["id"]
        if "least_capacity" in real:
            assert bisected(Replayer(events, streams).on_card) == real["least_capacity"]
        expandable = record.get("expandable", {}).get("real")
        if expandable:
            reserved = replay(events, streams, expandable=True).reserved_bytes
            assert reserved == pytest.approx(expandable["reserved_peak"])
        checked += 1
    assert checked > 10


def test_a_run_that_no_computer_holds_is_replayed() -> None:
    each = 1 << 70
    run = [each * (number + 1) for number in range(9)]
    run += [~number for number in range(9)]
    # All are free by now: the largest serves what is next.
    assert replay([*run, each]).reserved_bytes == each * 45
