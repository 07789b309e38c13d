"""What each rank of stages 1 and 2 keeps of the gradients that are reduced, and which keeps most."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from memplan.memory.deepspeed.partition import RankKinds


class KeptGradients:
    """For any number of kinds of ranks, the bytes each keeps; the highest is at hand at once.

    What all keep is counted once, so that a reduction costs no more than its owners are many.
    """

    def __init__(self, ranks: RankKinds, owned: Sequence[int], *, carries_owned: bool) -> None:
        self.ranks = ranks
        self.owned = owned
        """The buffer of each kind's own gradients [bytes]."""
        self.allocated = [False] * len(owned)
        self.own_bytes = list(owned) if carries_owned else [0] * len(owned)
        """What each kind keeps beside the others."""
        self.common_bytes = 0
        self._order = [(-size, number) for number, size in enumerate(self.own_bytes)]
        heapify(self._order)

    @property
    def fullest_bytes(self) -> int:
        """The most that a rank keeps."""
        return self.common_bytes + self.own_bytes[self._fullest()]

    @property
    def fullest_rank(self) -> int:
        """The lowest rank that keeps so much."""
        return self.rank(self._fullest())

    def rank(self, number: int) -> int:
        """The lowest rank of a kind."""
        return self.ranks.kinds[number].rank

    def bytes_of(self, number: int) -> int:
        """What a rank of one kind keeps."""
        return self.common_bytes + self.own_bytes[number]

    def owners(self, weights: Sequence[int]) -> dict[int, int]:
        """The kinds that own pieces of some parameters, and the elements of each one's largest."""
        found: dict[int, int] = {}
        shares = self.ranks.shares
        for weight in weights:
            for number, numel in shares.get(weight, ()):
                found[number] = max(found.get(number, 0), numel)
        return found

    def allocate(self, number: int) -> bool:
        """The buffer of a kind's own gradients comes with the first of them; whether it is new."""
        if self.allocated[number]:
            return False
        self.allocated[number] = True
        self._move(number, self.owned[number])
        return bool(self.owned[number])

    def linger(self, num_bytes: int, *, besides: Iterable[int]) -> None:
        """A gradient stays with every rank but those that own some of it."""
        self.common_bytes += num_bytes
        for number in besides:
            self._move(number, -num_bytes)

    def _move(self, number: int, change: int) -> None:
        if change:
            self.own_bytes[number] += change
            heappush(self._order, (-self.own_bytes[number], number))

    def _fullest(self) -> int:
        """The number of the fullest kind; entries that a change has made stale are dropped."""
        order = self._order
        while -order[0][0] != self.own_bytes[order[0][1]]:
            heappop(order)
        return order[0][1]
