"""What each rank of stages 1 and 2 keeps of the gradients that are reduced, and which keeps most."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from memplan.memory.deepspeed.partition import RankKinds


class KeptGradients:
    """For any number of kinds of ranks, the bytes each keeps; the highest is at hand at once.

    What all keep is counted once, so that a reduction costs no more than its owners are many.
    """

    def __init__(
        self, ranks: RankKinds, owned: Sequence[int], *, carried: bool, stays: bool
    ) -> None:
        """``carried``: each kind's own gradients of earlier micro-steps are there; ``stays``: and
        new ones are added to them."""
        self.ranks = ranks
        self.owned = owned
        """The buffer of each kind's own gradients [bytes]."""
        self.allocated = [stays] * len(owned)
        self.own_bytes = list(owned) if carried else [0] * len(owned)
        """What each kind keeps that not all do."""
        self.common_bytes = 0
        """What all keep."""
        self._own_stale = [0] * len(owned)
        self._num_reduced: dict[int, int] = {}
        self._num_all_own: dict[tuple[int, int], int] = {}
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
        """A reduced gradient stays with every rank but those that own some of it."""
        self.common_bytes += num_bytes
        self.linger_with(besides, -num_bytes)

    def linger_with(self, numbers: Iterable[int], num_bytes: int) -> None:
        """A reduced gradient stays with some kinds."""
        for number in numbers:
            self._own_stale[number] += num_bytes
            self._move(number, num_bytes)

    def stale_bytes(self, number: int) -> int:
        """Reduced gradients that a kind has not let go."""
        return self.common_bytes + self._own_stale[number]

    def view(self, bucket: int, weights: Sequence[int], owners: Iterable[int]) -> None:
        """Gradients that a bucket holds stay views of it with every rank that owns not all."""
        self._num_reduced[bucket] = self._num_reduced.get(bucket, 0) + 1
        for number in owners:
            if self.ranks.owns_all(number, weights):
                place = (bucket, number)
                self._num_all_own[place] = self._num_all_own.get(place, 0) + 1

    def num_viewed(self, number: int) -> int:
        """Buckets that other ranks' gradients are views of, on a rank of one kind."""
        return sum(
            count > self._num_all_own.get((bucket, number), 0)
            for bucket, count in self._num_reduced.items()
        )

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
