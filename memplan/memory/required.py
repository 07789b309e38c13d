"""What a run requires of a card: its program played out, and replayed through the allocator.

Everything that only a replay needs is imported when one is asked for.
"""

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass, replace
from memplan.memory.rank import RankInput
from memplan.training.choices import AllocatorKind
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.memory.allocator import AllocatorPeaks
    from memplan.memory.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunSource:
    """From which one rank's run is played out."""

    record: "Callable[[], RankInput]"
    """Records and walks the model, and others of its job, as that card runs them."""
    setup: TrainingSetup
    """With every default filled in."""
    rank: int
    workspace_bytes: int
    """cuBLAS's, of one thread."""
    capacity_bytes: int | None
    """Of the card; None: there is room for everything."""

    @property
    def played(self) -> "PlayedRun":
        """The run. What is found of it is kept, since GPUs and hints share it."""
        return _played(
            _Walked(self.record()),
            self.setup,
            self.rank,
            self.workspace_bytes,
            self.capacity_bytes,
        )


class _Walked:
    """A recorded model and its walk, told apart by the tape itself, and by what is beside it."""

    __slots__ = ("given",)

    def __init__(self, given: RankInput) -> None:
        self.given = given

    def __hash__(self) -> int:
        return id(self.given.tape)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Walked)
            and other.given.tape is self.given.tape
            and other.given.beside is self.given.beside
            and other.given.device == self.given.device
        )


@lru_cache(maxsize=64)
def _played(
    walked: _Walked,
    setup: TrainingSetup,
    rank: int,
    workspace_bytes: int,
    capacity_bytes: int | None,
) -> "PlayedRun":
    """The run, and what replays find of it, which outlives its many events."""
    play = partial(_ledger, walked, setup, rank, workspace_bytes, capacity_bytes)
    return PlayedRun(play, expandable=setup.allocator is AllocatorKind.EXPANDABLE)


@lru_cache(maxsize=8)
def _ledger(
    walked: _Walked,
    setup: TrainingSetup,
    rank: int,
    workspace_bytes: int,
    capacity_bytes: int | None,
) -> "Ledger":
    """Play loading and as many steps as the engine needs."""
    from memplan.memory.ledger import Ledger
    from memplan.memory.programs import program_of

    given = replace(walked.given, setup=setup)
    ledger = Ledger()
    program = program_of(
        given, ledger, rank=rank, workspace_bytes=workspace_bytes, capacity_bytes=capacity_bytes
    )
    program.run()
    return ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """What replays of a run have found, without the run: what another process is told."""

    source: RunSource
    """From which the run is played out again where something else is asked."""
    required: dict[tuple[int, ...], int]
    """The least capacity [bytes], by what it was asked for with."""
    cards: "dict[int | None, AllocatorPeaks]"
    """By the capacity that they were made with [bytes]; None: with room."""

    @property
    def peaks(self) -> "AllocatorPeaks":
        """What is reached on a card with room."""
        return self.on_card(None)

    def on_card(self, capacity_bytes: int | None) -> "AllocatorPeaks":
        """What is reached with so much room for segments."""
        found = self.cards.get(capacity_bytes)
        return found if found is not None else self.source.played.on_card(capacity_bytes)

    def required_on(self, capacities: tuple[int, ...]) -> int:
        """The least capacity, for a card that leaves so much for segments [bytes]."""
        found = self.required.get(capacities)
        return found if found is not None else self.source.played.required_on(capacities)


class PlayedRun:
    """One rank's run in the ledger that ``play`` returns; what a replay finds is kept."""

    __slots__ = ("_expandable", "_peaks", "_play", "_required")

    def __init__(self, play: "Callable[[], Ledger]", *, expandable: bool) -> None:
        self._play = play
        self._expandable = expandable
        self._peaks: dict[int | None, AllocatorPeaks] = {}
        self._required: dict[tuple[int, ...], int] = {}

    @property
    def peaks(self) -> "AllocatorPeaks":
        """What is reached on a card with room."""
        return self.on_card(None)

    @property
    def required_bytes(self) -> int:
        """The least capacity for the allocator's segments with which the run completes [bytes]."""
        return self.required_on(())

    def required_on(self, capacities: tuple[int, ...]) -> int:
        """The same on a card that leaves so much for segments, at the least and at the most [bytes].

        It agrees with what becomes of the run there: no more than the first that it completes with,
        and more than those before.
        """
        found = self._required.get(capacities)
        if found is None:
            from memplan.memory.allocator import least_capacity
            from memplan.memory.expandable import least_expandable_capacity

            above, within = 0, None
            for each in capacities:
                if self.peaks.reserved_bytes <= each or self.on_card(each).died_at is None:
                    within = each
                    break
                above = each
            search = least_expandable_capacity if self._expandable else least_capacity
            ledger = self._play()
            found = self._required[capacities] = search(
                ledger.events,
                ledger.streams,
                ledger.repeats,
                peaks=self.peaks,
                above_bytes=above,
                within_bytes=within,
            )
        return found

    def replays(self, source: RunSource) -> Replays:
        """All that was found so far."""
        return Replays(source=source, required=dict(self._required), cards=dict(self._peaks))

    def on_card(self, capacity_bytes: int | None) -> "AllocatorPeaks":
        """What is reached with so much room for segments."""
        found = self._peaks.get(capacity_bytes) or self._unhindered(capacity_bytes)
        if found is None:
            from memplan.memory.allocator import replay
            from memplan.memory.expandable import replay_expandable

            follow = replay_expandable if self._expandable else replay
            ledger = self._play()
            found = follow(
                ledger.events, ledger.streams, ledger.repeats, capacity_bytes=capacity_bytes
            )
            self._peaks[capacity_bytes] = found
        return found

    def _unhindered(self, capacity_bytes: int | None) -> "AllocatorPeaks | None":
        """What a replay reached that its card did not hinder: the same is reached where there is room."""
        for found in self._peaks.values():
            if (
                not found.num_flushes
                and found.died_at is None
                and (capacity_bytes is None or found.reserved_bytes <= capacity_bytes)
            ):
                self._peaks[capacity_bytes] = found
                return found
        return None
