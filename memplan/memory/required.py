"""What a run requires of a card: its program played out, and replayed through the allocator.

Everything that only a replay needs is imported when one is asked for.
"""

from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from memplan.fast_dataclass import dataclass, replace
from memplan.graph.remembered import OF_TAPES
from memplan.memory.rank import RankInput
from memplan.training.choices import AllocatorKind
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from memplan.memory.replaying.ledger import Cycle, Ledger
    from memplan.memory.replaying.replay import AllocatorPeaks, Replayer


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
    likeness: "Hashable" = None
    """Equal for runs of one model that differ in the sizes of its blocks alone, as far as their settings
    tell; None: with none."""

    @property
    def played(self) -> "PlayedRun":
        """The run. What is found of it is kept, since GPUs and hints share it."""
        run = _Run(
            _Walked(self.record()),
            self.setup,
            self.rank,
            self.workspace_bytes,
            self.capacity_bytes,
            self.likeness,
        )
        return _played(run)


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


class _Run(NamedTuple):
    """All that a run which is played out depends on (``RunSource``)."""

    walked: _Walked
    setup: TrainingSetup
    rank: int
    workspace_bytes: int
    capacity_bytes: int | None
    likeness: "Hashable"


@OF_TAPES.remembered(maxsize=256)
def _played(run: _Run) -> "PlayedRun":
    """The run, and what replays find of it, which outlives its many events."""
    return PlayedRun(partial(_replayer, run))


def _replayer(run: _Run) -> "Replayer":
    """The run, ready to be replayed; kept, since cards and searches ask it again."""
    found = REPLAYERS.get(run)
    if found is None:
        found = _prepared(run)
        REPLAYERS.keep(run, found, found.num_events)
    return found


def _prepared(asked: _Run) -> "Replayer":
    """Play loading and steps, up to one that all later ones are like."""
    from memplan.memory.replaying.replay import Replayer

    walked, setup, rank, workspace_bytes, capacity_bytes, likeness = asked
    given, sizes = replace(walked.given, setup=setup), list[int]()
    if likeness is None:
        run = _kept(UNLIKE, asked, asked, lambda: given)
    else:
        from memplan.memory.shapes import numbered, shape_of

        shape, sizes = shape_of(given, workspace_bytes=workspace_bytes)
        key = (likeness, shape, rank, capacity_bytes, given.device)
        run = _kept(NUMBERED, key, asked, lambda: numbered(given))
    expandable = setup.allocator is AllocatorKind.EXPANDABLE
    return Replayer(run.events, run.streams, run.cycle, expandable=expandable, sizes=sizes)


def _kept(
    runs: "KeptRuns[_Written]", key: "Hashable", asked: _Run, given: "Callable[[], RankInput]"
) -> "_Written":
    """A run as it was played out, now or before."""
    found = runs.get(key)
    if found is None:
        found = _written(given(), asked.rank, asked.workspace_bytes, asked.capacity_bytes)
        runs.keep(key, found, len(found.events))
    return found


class _Written(NamedTuple):
    """A run that was played out."""

    events: "Sequence[int]"
    streams: dict[int, int]
    cycle: "Cycle | None"


def _written(
    given: RankInput, rank: int, workspace_bytes: int, capacity_bytes: int | None
) -> _Written:
    """Play it out; its events as they are replayed, which takes a fifth of the memory of Python's numbers."""
    from memplan.memory.replaying.replay import playable

    ledger = _ledger(given, rank, workspace_bytes, capacity_bytes)
    return _Written(playable(ledger.events), ledger.streams, ledger.cycle)


def _ledger(
    given: RankInput, rank: int, workspace_bytes: int, capacity_bytes: int | None
) -> "Ledger":
    from memplan.memory.programs import program_of
    from memplan.memory.replaying.ledger import Ledger

    ledger = Ledger()
    program = program_of(
        given, ledger, rank=rank, workspace_bytes=workspace_bytes, capacity_bytes=capacity_bytes
    )
    program.run()
    return ledger


KEPT_EVENTS = 8_000_000
"""Of all runs that are kept, which take 64 MB where they are compiled code's: in a sweep the same runs come again with
every micro-batch, with other sizes, and where they are a few too many each is gone before it comes. Ten numbers of GPUs in six
ways on three cards are 124 runs: 2.7 million events of a model of 32 layers, 7 million of one of 80."""
FEW_EVENTS = 1_000_000
"""Of runs that the next micro-batch does not have again."""


RunT = TypeVar("RunT")


class KeptRuns(Generic[RunT]):
    """What is kept of runs: the latest, as far as they are short and few enough together."""

    def __init__(
        self,
        most_events: int = KEPT_EVENTS,
        *,
        most_runs: int | None = None,
        least_runs: int = 0,
    ) -> None:
        """``least_runs`` are kept however long they are."""
        self.most_events = most_events
        self.most_runs = most_runs
        self.least_runs = least_runs
        self._runs: dict[Hashable, tuple[RunT, int]] = {}
        self._num_events = 0

    def get(self, key: "Hashable") -> RunT | None:
        """One that is kept; it is then the latest."""
        found = self._runs.pop(key, None)
        if found is None:
            return None
        self._runs[key] = found
        return found[0]

    def keep(self, key: "Hashable", run: RunT, num_events: int) -> None:
        """A new one; what is too long by itself lasts with who asked for it alone."""
        self._num_events += num_events
        self._runs[key] = run, num_events
        while len(self._runs) > self.least_runs and self._is_too_much():
            self._num_events -= self._runs.pop(next(iter(self._runs)))[1]

    def _is_too_much(self) -> bool:
        is_many = self.most_runs is not None and len(self._runs) > self.most_runs
        return is_many or self._num_events > self.most_events

    def clear(self) -> None:
        """Keep none."""
        self._runs.clear()
        self._num_events = 0


NUMBERED = KeptRuns[_Written]()
"""Runs with stand-ins for the sizes of the model's blocks, for all runs of one shape."""
UNLIKE = KeptRuns[_Written](2 * FEW_EVENTS)
"""Runs that are like no others, of pipelines and of jobs of several models, the tapes that they are of with them."""
REPLAYERS = KeptRuns["Replayer"](FEW_EVENTS, most_runs=8, least_runs=1)
"""Runs as they are replayed, the tapes that they are of with them; they take three times as much, and places beside."""
OF_TAPES.forget_with(UNLIKE.clear)
OF_TAPES.forget_with(REPLAYERS.clear)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """What replays of a run have found, without the run: what another process is told."""

    source: RunSource
    """From which the run is played out again where something else is asked."""
    found: "tuple[AllocatorPeaks, ...]"
    least_bytes: int | None
    """The least capacity, where it was looked for [bytes]."""

    @property
    def required_bytes(self) -> int:
        """The least capacity from which on every larger one is enough [bytes]."""
        least = self.least_bytes
        return least if least is not None else self.source.played.required_bytes

    @property
    def peaks(self) -> "AllocatorPeaks":
        """What is reached on a card with room."""
        return self.on_card(None)

    @property
    def is_settled(self) -> bool:
        """Whether steps came to be all alike with the least capacity; else not all that there are were played."""
        return self.on_card(self.required_bytes).is_settled

    def islands(self) -> "list[tuple[int, int]]":
        """Capacities below the least one with which the run lives all the same, each range with its end [bytes]."""
        return self.source.played.islands()

    def gaps(self) -> "list[tuple[int, int]]":
        """Capacities above the least one with which the run dies all the same, each range with its end [bytes]."""
        return self.source.played.gaps()

    def is_enough(self, capacity_bytes: int) -> bool:
        """Whether so much room for segments is enough, and all that is more."""
        if self.peaks.reserved_bytes <= capacity_bytes:
            return True
        if self.least_bytes is None:
            return self.source.played.is_enough(capacity_bytes)
        return self.least_bytes <= capacity_bytes and self.on_card(capacity_bytes).died_at is None

    def may_be_enough(self, capacity_bytes: int) -> bool:
        """Whether a first look does not deny that."""
        if self.least_bytes is not None:
            return self.least_bytes <= capacity_bytes
        return self.source.played.may_be_enough(capacity_bytes)

    def on_card(self, capacity_bytes: int | None) -> "AllocatorPeaks":
        """What is reached with so much room for segments."""
        from memplan.memory.replaying.replay import known_on

        known = known_on(self.found, capacity_bytes)
        return known if known is not None else self.source.played.on_card(capacity_bytes)


class PlayedRun:
    """One rank's run, replayed by the ``Replayer`` that ``play`` returns; what replays find is kept."""

    __slots__ = ("_found", "_play", "_required")

    def __init__(self, play: "Callable[[], Replayer]") -> None:
        self._play = play
        self._found: list[AllocatorPeaks] = []
        self._required: int | None = None

    @property
    def peaks(self) -> "AllocatorPeaks":
        """What is reached on a card with room."""
        return self.on_card(None)

    @property
    def required_bytes(self) -> int:
        """The least capacity for the allocator's segments from which on every larger one is enough [bytes]."""
        if self._required is None:
            from memplan.memory.replaying.replay import floor_bytes

            self._required = floor_bytes(self.on_card, caution=self._play().caution)
        return self._required

    @property
    def is_settled(self) -> bool:
        """Whether steps came to be all alike with the least capacity; else not all that there are were played."""
        return self.on_card(self.required_bytes).is_settled

    def islands(self) -> "list[tuple[int, int]]":
        """Capacities below the least one with which the run lives all the same, each range with its end [bytes]."""
        from memplan.memory.replaying.replay import islands

        return islands(self.on_card, below_bytes=self.required_bytes)

    def gaps(self) -> "list[tuple[int, int]]":
        """Capacities above the least one with which the run dies all the same, each range with its end [bytes]."""
        from memplan.memory.replaying.replay import gaps

        return gaps(self.on_card, above_bytes=self.required_bytes)

    def is_enough(self, capacity_bytes: int) -> bool:
        """Whether so much room for segments is enough, and all that is more."""
        if self._required is not None:
            died_at = self.on_card(capacity_bytes).died_at
            return self._required <= capacity_bytes and died_at is None
        from memplan.memory.replaying.replay import is_enough

        return is_enough(self.on_card, capacity_bytes, caution=self._play().caution)

    def may_be_enough(self, capacity_bytes: int) -> bool:
        """Whether the run lives with it, without which it is not enough."""
        return self.on_card(capacity_bytes).died_at is None

    def replays(self, source: RunSource) -> Replays:
        """All that was found so far."""
        return Replays(source=source, found=tuple(self._found), least_bytes=self._required)

    def on_card(
        self, capacity_bytes: int | None, *, max_cycles: int | None = None
    ) -> "AllocatorPeaks":
        """What is reached with so much room for segments."""
        from memplan.memory.replaying.replay import MAX_CYCLES, known_on

        most = MAX_CYCLES if max_cycles is None else max_cycles
        found = known_on(self._found, capacity_bytes, max_cycles=most)
        if found is None:
            found = self._play().on_card(capacity_bytes, max_cycles=most)
            self._found.append(found)
        return found
