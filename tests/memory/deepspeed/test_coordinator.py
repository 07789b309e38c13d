"""Fetching, prefetching and releasing, step by step."""

from collections.abc import Sequence

import pytest

from memplan.memory.deepspeed.coordinator import FetchSettings, Visited
from memplan.memory.programs.deepspeed_stages.gathering import PlayedCoordinator
from memplan.memory.replaying.ledger import Ledger

KIB = 512
"""Elements that are 1 KiB in bf16."""


class Coordinator(PlayedCoordinator):
    """One with a trace, and what is alive in its ledger."""

    def __init__(
        self,
        settings: FetchSettings,
        numels: Sequence[int],
        trace: Sequence[Sequence[int]],
        *sealed: int,
    ) -> None:
        super().__init__(
            settings, numels, Ledger(), stream=0, persistent=frozenset(), sealed=frozenset(sealed)
        )
        self.recorded = list(trace)
        self.restart()

    def highest(self) -> int:
        """The next module runs: the most that is alive until then [bytes]."""
        first = len(self.ledger.events)
        self.enter()
        return max(self._alive(number + 1) for number in range(first, len(self.ledger.events)))

    @property
    def gathered_bytes(self) -> int:
        """Alive now."""
        return self._alive(len(self.ledger.events))

    def _alive(self, count: int) -> int:
        events = self.ledger.events
        return sum(each if each > 0 else -events[~each] for each in events[:count])


def settings(**given: object) -> FetchSettings:
    fields: dict[str, object] = {
        "num_ranks": 2, "weight_bytes": 2, "prefetch_bucket_size": 0,
        "max_live_parameters": 10**9, "max_reuse_distance": 0, "sequential": False,
        "offloaded": False,
    }  # fmt: skip
    return FetchSettings(**{**fields, **given})  # type: ignore[arg-type]


def test_one_parameter_is_a_view_of_its_buffer() -> None:
    coordinator = Coordinator(settings(), [KIB], [[0], [0]])
    assert coordinator.highest() == 1024
    assert coordinator.gathered_bytes == 1024


def test_several_are_copied_out_of_a_flat_buffer() -> None:
    coordinator = Coordinator(settings(), [KIB, KIB], [[0, 1]])
    assert coordinator.highest() == 4096
    assert coordinator.gathered_bytes == 2048
    coordinator.release([0, 1])
    assert coordinator.gathered_bytes == 0


def test_sequential_has_no_flat_buffer() -> None:
    coordinator = Coordinator(settings(sequential=True), [KIB, KIB], [[0, 1]])
    assert coordinator.highest() == 2048


def test_prefetch_stops_at_its_bucket() -> None:
    trace = [[0], [1], [2], [3]]
    coordinator = Coordinator(settings(prefetch_bucket_size=KIB), [KIB] * 4, trace)
    coordinator.enter()
    assert sorted(coordinator.sizes) == [0, 1]


def test_prefetch_stops_at_live_parameters() -> None:
    given = settings(prefetch_bucket_size=10 * KIB, max_live_parameters=KIB)
    coordinator = Coordinator(given, [KIB] * 4, [[0], [1], [2], [3]])
    coordinator.enter()
    assert sorted(coordinator.sizes) == [0]


def test_a_flat_buffer_lives_until_its_last_parameter_runs() -> None:
    given = settings(prefetch_bucket_size=2 * KIB)
    coordinator = Coordinator(given, [KIB] * 3, [[0], [1], [2]])
    coordinator.enter()
    assert coordinator.gathered_bytes == 3 * 1024
    coordinator.release([0])
    coordinator.enter()
    assert coordinator.gathered_bytes == 2048 + 2048
    coordinator.release([1])
    coordinator.enter()
    assert coordinator.gathered_bytes == 1024


def test_what_is_needed_soon_stays() -> None:
    trace = [[0], [1], [0]]
    near = Coordinator(settings(max_reuse_distance=2 * KIB), [KIB] * 2, trace)
    far = Coordinator(settings(max_reuse_distance=KIB), [KIB] * 2, trace)
    for coordinator in (near, far):
        coordinator.enter()
        coordinator.release([0])
    assert 0 in near.sizes
    assert 0 not in far.sizes


def test_a_sealed_module_is_no_way_to_another() -> None:
    """Qwen2-MoE's embedding: of the layers up to its next use only what is not experts' counts."""
    trace = [[0], [1], [0]]
    coordinator = Coordinator(settings(max_reuse_distance=KIB), [KIB] * 2, trace, 1)
    coordinator.enter()
    coordinator.release([0])
    assert 0 in coordinator.sizes


@pytest.mark.parametrize(("reach", "stays"), [(2 * KIB + 1, True), (2 * KIB, False)])
def test_a_sealed_module_is_looked_for_inside_others(reach: int, stays: bool) -> None:
    """The whole model's own step, behind one of a layer that has two KiB in it and in its modules."""
    trace = [Visited([0], [0]), Visited([], [1, 2]), Visited([], range(3)), Visited([0], [0])]
    coordinator = Coordinator(settings(max_reuse_distance=reach), [KIB] * 3, trace, 0)
    coordinator.enter()
    coordinator.release([0])
    assert (0 in coordinator.sizes) is stays


def test_what_prefetch_passed_over_stays() -> None:
    """The scan for what comes next meets a parameter that is there: it is kept for that use."""
    given = settings(prefetch_bucket_size=2 * KIB)
    coordinator = Coordinator(given, [KIB] * 3, [[0], [1], [0], [2]])
    coordinator.enter()
    coordinator.release([0])
    assert 0 in coordinator.sizes


def test_shards_come_from_the_cpu() -> None:
    coordinator = Coordinator(settings(offloaded=True), [KIB], [[0]])
    assert coordinator.highest() == 1024 + 512
    assert coordinator.gathered_bytes == 1024
