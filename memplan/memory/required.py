"""What a run requires of a card: its program played out and replayed through the allocator."""

from memplan.memory.allocator import AllocatorPeaks, least_capacity, replay
from memplan.memory.expandable import least_expandable_capacity, replay_expandable
from memplan.memory.ledger import Ledger


class PlayedRun:
    """One rank's run in a ledger; figures are found when they are asked for, and kept."""

    __slots__ = ("_expandable", "_peaks", "_required", "ledger")

    def __init__(self, ledger: Ledger, *, expandable: bool) -> None:
        self.ledger = ledger
        self._expandable = expandable
        self._peaks: AllocatorPeaks | None = None
        self._required: int | None = None

    @property
    def peaks(self) -> AllocatorPeaks:
        """What is reached on a card with room."""
        if self._peaks is None:
            self._peaks = self.on_card(None)
        return self._peaks

    @property
    def required_bytes(self) -> int:
        """The least capacity for the allocator's segments with which the run completes [bytes]."""
        if self._required is None:
            search = least_expandable_capacity if self._expandable else least_capacity
            self._required = search(self.ledger.events, self.ledger.streams, peaks=self.peaks)
        return self._required

    def on_card(self, capacity_bytes: int | None) -> AllocatorPeaks:
        """What is reached with so much room for segments."""
        follow = replay_expandable if self._expandable else replay
        return follow(self.ledger.events, self.ledger.streams, capacity_bytes=capacity_bytes)
