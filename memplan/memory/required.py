"""What a run requires of a card: its program played out, and replayed through the allocator."""

from functools import lru_cache

from memplan.memory.allocator import AllocatorPeaks, least_capacity, replay
from memplan.memory.expandable import least_expandable_capacity, replay_expandable
from memplan.memory.ledger import Ledger
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput


class PlayedRun:
    """One rank's run in a ledger; what a replay finds is kept."""

    __slots__ = ("_expandable", "_peaks", "_required", "ledger")

    def __init__(self, ledger: Ledger, *, expandable: bool) -> None:
        self.ledger = ledger
        self._expandable = expandable
        self._peaks: dict[int | None, AllocatorPeaks] = {}
        self._required: int | None = None

    @property
    def peaks(self) -> AllocatorPeaks:
        """What is reached on a card with room."""
        return self.on_card(None)

    @property
    def required_bytes(self) -> int:
        """The least capacity for the allocator's segments with which the run completes [bytes]."""
        if self._required is None:
            search = least_expandable_capacity if self._expandable else least_capacity
            self._required = search(self.ledger.events, self.ledger.streams, peaks=self.peaks)
        return self._required

    def on_card(self, capacity_bytes: int | None) -> AllocatorPeaks:
        """What is reached with so much room for segments."""
        found = self._peaks.get(capacity_bytes)
        if found is None:
            follow = replay_expandable if self._expandable else replay
            found = follow(self.ledger.events, self.ledger.streams, capacity_bytes=capacity_bytes)
            self._peaks[capacity_bytes] = found
        return found


@lru_cache(maxsize=8)
def play(given: RankInput, *, workspace_bytes: int, expandable: bool = False) -> PlayedRun | None:
    """Play two steps of a rank's run; None where its engine has no program yet."""
    ledger = Ledger()
    program = program_of(given, ledger, workspace_bytes=workspace_bytes)
    if program is None:
        return None
    program.run()
    return PlayedRun(ledger, expandable=expandable)
