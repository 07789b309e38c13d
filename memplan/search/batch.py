"""The largest micro-batch that fits."""

from collections.abc import Callable, Sequence

from memplan.estimator import Estimate, estimate
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.runtime import LEAST_OVER_REQUESTED, bounded_range
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup

MAX_MICRO_BATCH = 65_536
"""Sequences of one micro-batch beyond which nobody looks for more."""


def largest_micro_batch(
    model: ModelSpec,
    setup: TrainingSetup,
    gpu: GpuSpec,
    *,
    limit: int = MAX_MICRO_BATCH,
    known: Estimate | None = None,
) -> int:
    """The largest ``micro_batch_size`` that fits, everything else being as in ``setup``; 0: none.

    ``known`` is an estimate of ``setup`` itself, where there is one: the search goes as deep as it
    does. Runs are replayed where bounds leave open whether they fit, unless it rests on bounds too.
    Raises ``SetupError`` for a setup that cannot be trained.

    >>> from memplan.sources.catalog import load_gpu
    >>> from memplan.sources.models import load_model
    >>> setup = TrainingSetup(seq_len=512, checkpointing="full")
    >>> largest_micro_batch(load_model("gpt2"), setup, load_gpu("v100-16gb"))
    36
    """
    answers: dict[int, Estimate] = {} if known is None else {setup.micro_batch_size: known}

    def ask(size: int) -> Estimate:
        if size not in answers:
            answers[size] = estimate(model, replace(setup, micro_batch_size=size), gpu)
        return answers[size]

    search = SizeSearch(ask, gpu.capacity_bytes)
    if known is None:
        return search.replayed(limit=limit)
    first = likely_size(known, gpu.capacity_bytes)
    run = search.replayed if known.is_replayed else search.bounded
    return run(limit=limit, first=first, known=known)


class SizeSearch:
    """Looks for the largest micro-batch that so much of a GPU is enough for."""

    def __init__(
        self, ask: Callable[[int], Estimate], capacity_bytes: int, *, looks_beyond: bool = False
    ) -> None:
        self._ask = ask
        self._capacity_bytes = capacity_bytes
        self._looks_beyond = looks_beyond
        """Larger sizes are looked at too, should what is needed not grow with each step."""

    def bounded(
        self, *, limit: int = MAX_MICRO_BATCH, first: int = 1, known: Estimate | None = None
    ) -> int:
        """The largest that fits by the upper bound: without a replay; 0: none."""
        return self._search(least_room, limit=limit, first=first, known=known)

    def replayed(
        self, *, limit: int = MAX_MICRO_BATCH, first: int = 1, known: Estimate | None = None
    ) -> int:
        """The largest that fits; 0: none.

        First the largest that can fit by what it allocates; most often that one does. Only between
        it and what fits by the bound are runs replayed.
        """
        largest = self._search(most_room, limit=limit, first=first, known=known)
        if not largest or self._fits(largest):
            return largest
        likely = int(largest / LEAST_OVER_REQUESTED[1])
        surely = self.bounded(limit=largest - 1, first=max(1, likely)) if largest > 1 else 0
        found = largest_of(range(surely + 1, largest), self._fits)
        return surely if found is None else found

    def _fits(self, size: int) -> bool:
        return fits_within(self._ask(size), self._capacity_bytes)

    def _search(
        self,
        room: Callable[[Estimate, int], int],
        *,
        limit: int,
        first: int,
        known: Estimate | None,
    ) -> int:
        search = LargestFit(
            self._ask,
            room=lambda answer: room(answer, self._capacity_bytes),
            limit=limit,
            first=first,
        )
        if known is not None:
            search.tell(known.setup.micro_batch_size, known)
        return search.run_checked() if self._looks_beyond else search.run()


def fits_within(answer: Estimate, capacity_bytes: int) -> bool:
    """Whether a run fits so much of a GPU for certain; replayed where bounds leave it open."""
    if surely_fits(answer, capacity_bytes):
        return True
    if most_room(answer, capacity_bytes) < 0:
        return False
    room = capacity_bytes - answer.overhead_bytes.high
    return answer.fullest.run.on_card(room).died_at is None


def surely_fits(answer: Estimate, capacity_bytes: int) -> bool:
    """Whether the upper bound of what a run needs is within so much of a GPU."""
    return least_room(answer, capacity_bytes) >= 0


def least_room(answer: Estimate, capacity_bytes: int) -> int:
    """What the upper bound leaves; below zero where that does not fit [bytes]."""
    if answer.unmodelled:
        return -1
    needed = bounded_range(answer.fullest.worst_bytes, answer.overhead_bytes)
    return capacity_bytes - needed.high


def most_room(answer: Estimate, capacity_bytes: int) -> int:
    """What is left where the allocator needs no more than is asked of it [bytes]."""
    if answer.unmodelled:
        return -1
    return capacity_bytes - answer.fullest.worst_bytes - answer.overhead_bytes.high


def likely_size(known: Estimate, capacity_bytes: int) -> int:
    """Where the largest micro-batch is to be looked for first, by what one sequence keeps."""
    size = known.setup.micro_batch_size
    each = max(1, known.fullest.activations_bytes // size)
    return max(1, size + most_room(known, capacity_bytes) // each)


class LargestFit:
    """Looks for the largest size that leaves room, by bisection that aims.

    A larger micro-batch never needs less memory, and needs nearly as much more for each sequence
    as the one before: a straight line through two answers says where to look next. Only answers
    count: the result is a size that fits, and the next one was seen not to.
    """

    def __init__(
        self,
        ask: Callable[[int], Estimate],
        *,
        room: Callable[[Estimate], int],
        limit: int = MAX_MICRO_BATCH,
        first: int = 1,
    ) -> None:
        self._ask = ask
        self._room = room
        self._limit = limit
        self._first = first
        self._rooms: dict[int, int] = {}
        self._low, self._high = 0, limit + 1

    def tell(self, size: int, answer: Estimate) -> None:
        """Take an answer that is known already into account."""
        self._note(size, self._room(answer))

    def run(self) -> int:
        """The size; 0 where not even 1 fits."""
        while self._high - self._low > 1:
            size = self._next()
            self._note(size, self._room(self._ask(size)))
        return self._low

    def run_checked(self) -> int:
        """The size; larger ones are looked at too, should what is needed not grow with each step."""
        best = self.run()
        for eighths in _LOOKED_BEYOND:
            size = best * eighths // 8
            if not best < size <= self._limit or size in self._rooms:
                continue
            room = self._room(self._ask(size))
            self._note(size, room)
            if room >= 0:
                failed = [each for each, left in self._rooms.items() if left < 0 and each > size]
                self._high = min(failed, default=self._limit + 1)
                return self.run_checked()
        return best

    def _note(self, size: int, room: int) -> None:
        self._rooms[size] = room
        if room >= 0:
            self._low = max(self._low, size)
        else:
            self._high = min(self._high, size)

    def _next(self) -> int:
        """Where to look next: between what fits and what does not."""
        low, high = self._low, self._high
        if not self._rooms:
            return min(self._first, self._limit)
        if len(self._rooms) == 1:
            guess = low + 1 if low else high // 2
            if self._first not in self._rooms:
                guess = self._first
        elif len(self._rooms) > _AIMED and high <= self._limit:
            guess = (low + high) // 2
        else:
            guess = self._aim()
        if high > self._limit:
            high = min(high, 8 * low + 8)
        return min(max(guess, low + 1), high - 1)

    def _aim(self) -> int:
        """Where the line through the two answers nearest to the border meets it."""
        sizes = sorted(self._rooms, key=lambda size: abs(self._rooms[size]))
        first, second = sorted(sizes[:2])
        slope = (self._rooms[first] - self._rooms[second]) / (second - first)
        if slope <= 0:
            return 2 * self._low
        guess = int(first + self._rooms[first] / slope)
        # The border is beside the guess, mostly: the size before tells as much as the size itself.
        return guess + 1 if guess == self._low else guess


_LOOKED_BEYOND = (9, 10, 12, 16)
"""Multiples of the largest size found, in eighths, that are looked at to be sure."""
_AIMED = 8
"""Answers after which the interval is halved: the line is then none."""


def largest_of(sizes: Sequence[int], is_small_enough: Callable[[int], bool]) -> int | None:
    """The largest of some ascending sizes that is small enough, by bisection; None: not even one.

    >>> largest_of([1, 2, 4, 8], lambda size: size < 5)
    4
    """
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if is_small_enough(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else None
