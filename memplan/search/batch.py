"""The largest micro-batch that fits."""

from collections.abc import Callable, Sequence

from memplan.estimator import Estimate, at_high_end, bare_estimate
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.account import ComponentKind
from memplan.model.spec import ModelSpec
from memplan.training.precision import PRECISIONS
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

    ``known`` is an estimate of ``setup`` itself, where there is one. Raises ``SetupError`` for a setup
    that cannot be trained.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> from memplan.sources.models import load_model
    >>> setup = TrainingSetup(seq_len=512, checkpointing="full")
    >>> largest_micro_batch(load_model("gpt2"), setup, load_gpu("v100-16gb"))
    35
    """
    answers: dict[int, Estimate] = {} if known is None else {setup.micro_batch_size: known}
    high = at_high_end(setup)
    fullest: dict[int, Estimate] = {}

    def ask(size: int) -> Estimate:
        if size not in answers:
            found = bare_estimate(model, replace(setup, micro_batch_size=size), gpu)
            answers[size] = replace(found, crowded=fullest.get(size, found.crowded))
        return answers[size]

    def ask_fullest(size: int) -> Estimate:
        if high is None or size in answers:
            return ask(size).fullest
        if size not in fullest:
            fullest[size] = bare_estimate(model, replace(high, micro_batch_size=size), gpu)
        return fullest[size]

    search = SizeSearch(ask, gpu.capacity_bytes, ask_fullest=ask_fullest)
    return search.run(limit=limit, known=known)


class SizeSearch:
    """Looks for the largest micro-batch that so much of a GPU is enough for."""

    def __init__(
        self,
        ask: Callable[[int], Estimate],
        capacity_bytes: int,
        *,
        looks_beyond: bool = False,
        grows_activations: bool = True,
        ask_fullest: Callable[[int], Estimate] | None = None,
        ram_room: Callable[[Estimate], int | None] = lambda _: None,
    ) -> None:
        self._ask = ask
        self._ask_fullest = ask_fullest or (lambda size: ask(size).fullest)
        """Of a range of assumptions, its high end alone: what allocates most."""
        self._ram_room = ram_room
        """What is left of a node's CPU RAM [bytes]; None: that is not looked at."""
        self._capacity_bytes = capacity_bytes
        self._looks_beyond = looks_beyond
        """Larger sizes are looked at too, should what is needed not grow with each step."""
        self._grows_activations = grows_activations
        """The size is of what makes activations, and nothing else: one answer tells where the border is likely."""

    def run(
        self, *, limit: int = MAX_MICRO_BATCH, first: int = 1, known: Estimate | None = None
    ) -> int:
        """The largest that fits; 0: none.

        First the largest that can fit by what it allocates; most often that one does. Where it does not,
        sizes below it are looked at, from a likely one on. A first look at a size is one replay; that every
        larger card is enough too is asked of the one that is returned.
        """
        largest = self.most(limit=limit, first=first, known=known)
        if not largest:
            return 0
        needed = self._ask_fullest(largest)
        if needed.fits_within(self._capacity_bytes):
            return largest
        guess = 0
        if largest > 1:
            # What is needed lies between what is allocated and what is reserved with room.
            likely = (needed.worst_bytes + needed.reserved_bytes) // 2
            guess = self._largest(likely, needed.worst_bytes, limit=largest - 1, first=largest - 1)
        return self._below(largest, guess or largest - 1)

    def most(
        self, *, limit: int = MAX_MICRO_BATCH, first: int = 1, known: Estimate | None = None
    ) -> int:
        """The largest that can fit by what it allocates at once, for which nothing is replayed; 0: none."""
        return self._largest(1, 1, limit=limit, first=first, known=known)

    def _below(self, high: int, guess: int) -> int:
        """The largest size below one that does not fit, looked for from a likely one on; 0: none."""
        while found := self._border(high, guess):
            if self._ask(found).fits_within(self._capacity_bytes):
                return found
            high, guess = found, found - 1
        return 0

    def _border(self, high: int, guess: int) -> int:
        """Below what does not fit, a size that may, where the next one does not: in steps that double, then
        by bisection; 0: there is none."""
        low, step, has_turned = 0, 1, False
        while high - low > 1:
            size = (low + high) // 2 if has_turned else min(max(guess, low + 1), high - 1)
            if self._may_fit(size):
                has_turned |= step < 0
                low, guess = size, size + abs(step)
            else:
                has_turned |= low > 0
                high, guess = size, size - abs(step)
                step = -abs(step)
            step *= 2
        return low

    def _may_fit(self, size: int) -> bool:
        """Whether a first look at a size does not deny it, at the high end first."""
        capacity = self._capacity_bytes
        fullest = self._ask_fullest(size)
        return fullest.may_fit_within(capacity) and self._ask(size).may_fit_within(capacity)

    def _largest(
        self,
        required_bytes: int,
        of_bytes: int,
        *,
        limit: int,
        first: int,
        known: Estimate | None = None,
    ) -> int:
        """The largest that fits if of every ``of_bytes`` that are allocated so many are required."""
        capacity = self._capacity_bytes

        def rooms(answer: Estimate) -> tuple[int, ...]:
            if answer.unmodelled:
                return (-1,)
            required = answer.fullest.worst_bytes * required_bytes // of_bytes
            room, ram = capacity - required - answer.overhead_bytes.high, self._ram_room(answer)
            return (room,) if ram is None else (room, ram)

        def growth(answer: Estimate) -> float:
            room = capacity - answer.overhead_bytes.high
            return likely_growth(answer.fullest, room * of_bytes // required_bytes)

        search = LargestFit(
            self._ask_fullest,
            rooms=rooms,
            limit=limit,
            first=first,
            growth=growth if self._grows_activations else None,
        )
        if known is not None:
            search.tell(known.setup.micro_batch_size, known)
        return search.run_checked() if self._looks_beyond else search.run()


def most_room(answer: Estimate, capacity_bytes: int) -> int:
    """What is left where the allocator needs no more than is asked of it [bytes]."""
    return capacity_bytes - answer.fullest.worst_bytes - answer.overhead_bytes.high


GROWING = (ComponentKind.INPUTS, ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS)
"""What there is the more of, the more tokens a step has."""

UNTOLD_GROWTH = 8.0
"""By how much a size grows at once where no answer says how much it may."""


def likely_growth(answer: Estimate, room_bytes: int) -> float:
    """By how much tokens may become more until some phase takes so much room, as if nothing else grew with them.

    Among activations lie autocast's casts of all weights of another format, which do not. Where no phase has more than
    those, a few times as many are taken: far beyond the border an answer costs as much as the sequences it is of.
    """
    found = []
    precision = PRECISIONS[answer.setup.chosen_precision]
    autocast = precision.autocast
    casts = 0
    if autocast is not None and autocast is not precision.weights:
        casts = autocast.num_bytes * answer.num_params
    for phase in answer.account.phases:
        growing = sum(entry.num_bytes for entry in phase.entries if entry.kind in GROWING) - casts
        if growing > 0:
            found.append((room_bytes - phase.peak_bytes + growing) / growing)
    return max(0.0, min(found, default=UNTOLD_GROWTH))


class LargestFit:
    """Looks for the largest size that leaves room, by bisection that aims.

    A larger micro-batch never needs less memory, and needs nearly as much more for each sequence
    as the one before: what grows of the first answer, then a straight line through the two answers at the border
    say where to look next. Only answers count: the result is a size that fits, and the next one was seen not to.
    """

    def __init__(
        self,
        ask: Callable[[int], Estimate],
        *,
        rooms: Callable[[Estimate], tuple[int, ...]],
        limit: int = MAX_MICRO_BATCH,
        first: int = 1,
        growth: Callable[[Estimate], float] | None = None,
    ) -> None:
        self._ask = ask
        self._growth = growth
        """By how much an answer's size may grow, as far as it tells; None: it does not."""
        self._likely = first
        """Where the border is by the first answer."""
        self._rooms_of = rooms
        """What is left, of everything that there is so much of: below 0 where that is too little."""
        self._limit = limit
        self._first = first
        self._rooms: dict[int, tuple[int, ...]] = {}
        self._low, self._high = 0, limit + 1

    def tell(self, size: int, answer: Estimate) -> None:
        """Take an answer that is known already into account."""
        self._note(size, answer)

    def run(self) -> int:
        """The size; 0 where not even 1 fits."""
        while self._high - self._low > 1:
            size = self._next()
            self._note(size, self._ask(size))
        return self._low

    def run_checked(self) -> int:
        """The size; larger ones are looked at too, should what is needed not grow with each step."""
        best = self.run()
        for eighths in _LOOKED_BEYOND:
            size = best * eighths // 8
            if not best < size <= self._limit or size in self._rooms:
                continue
            self._note(size, self._ask(size))
            if min(self._rooms[size]) >= 0:
                failed = [
                    each for each, left in self._rooms.items() if min(left) < 0 and each > size
                ]
                self._high = min(failed, default=self._limit + 1)
                return self.run_checked()
        return best

    def _note(self, size: int, answer: Estimate) -> None:
        rooms = self._rooms[size] = self._rooms_of(answer)
        if self._growth is not None and len(self._rooms) == 1:
            self._likely = round(size * self._growth(answer))
        if min(rooms) >= 0:
            self._low = max(self._low, size)
        else:
            self._high = min(self._high, size)

    def _next(self) -> int:
        """Where to look next: between what fits and what does not."""
        low, high = self._low, self._high
        if not self._rooms:
            return min(self._first, self._limit)
        if len(self._rooms) == 1:
            if self._likely not in self._rooms:
                return min(max(self._likely, low + 1), high - 1)
            before = high // 2 if self._growth is None else high - 1
            guess = low + 1 if low else before
        elif len(self._rooms) > _AIMED and high <= self._limit:
            guess = (low + high) // 2
        else:
            guess = self._aim()
        if high > self._limit:
            high = min(high, 8 * low + 8)
        return min(max(guess, low + 1), high - 1)

    def _aim(self) -> int:
        """Where the first of these meets its border."""
        guess = min(map(self._aim_at, range(min(map(len, self._rooms.values())))))
        # The border is beside the guess, mostly: the size before tells as much as the size itself.
        return guess + 1 if guess == self._low else guess

    def _aim_at(self, place: int) -> int:
        """Where the line through the two answers at one border meets it: those on either side of it, or the nearest."""
        rooms = {size: left[place] for size, left in self._rooms.items()}
        fitting = sorted(size for size, left in rooms.items() if left >= 0)
        others = sorted(size for size, left in rooms.items() if left < 0)
        at_border = (
            [*fitting[-1:], *others[:1]] if fitting and others else (fitting[-2:] or others[:2])
        )
        first, second = sorted(at_border)
        slope = (rooms[first] - rooms[second]) / (second - first)
        return int(first + rooms[first] / slope) if slope > 0 else 2 * self._low


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
