"""One candidate of a plan: its estimates by size, and the largest size that fits.

A size is a micro-batch; where longer sequences or more layers are looked for, it is so many of them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate, least_bytes
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.runtime import overhead_range
from memplan.model.spec import ModelSpec
from memplan.search.batch import MAX_MICRO_BATCH, SizeSearch, largest_of, most_room
from memplan.search.depth import with_layers
from memplan.search.grid import with_global_batch
from memplan.search.largest import most
from memplan.search.node_ram import usual_node_bytes
from memplan.search.planning.best_first import BestFirst, sized
from memplan.search.planning.degrees import degrees_of
from memplan.search.planning.floors import resident_floor, waiting_floor
from memplan.search.planning.goal import Goal, Objective
from memplan.search.planning.space import Candidate
from memplan.search.planning.speed import setup_speed
from memplan.search.quantity import Quantity
from memplan.training.setup import TrainingSetup

SEQ_LEN_STEP = 128
"""Sequences are lengthened by so many tokens: kernels work on blocks of them."""


class Sizing:
    """Estimates of the candidates of one goal on one kind of GPU, each made once."""

    def __init__(self, goal: Goal, model: ModelSpec, gpu: GpuSpec, best_first: BestFirst) -> None:
        self.goal = goal
        self.model = model
        self.gpu = gpu
        self.best_first = best_first
        self.sizes = best_first.sizes
        self.limit_bytes = int(gpu.capacity_bytes * (1 - goal.headroom))
        self.stretches = goal.objective in (Objective.SEQ_LEN, Objective.LAYERS)
        """What is looked for is no micro-batch: that is given, and offloading lengthens it."""
        self._answers: dict[int, tuple[TrainingSetup, dict[int, Estimate]]] = {}
        """Estimates of each setup, by size."""
        self._last: dict[object, int] = {}
        """The last size that fitted, by everything but the number of GPUs: where to look
        first when there are more."""

    def estimate(self, setup: TrainingSetup, size: int) -> Estimate:
        """One estimate, made once: a search ends where it has been."""
        _, answers = self._answers.setdefault(id(setup), (setup, {}))
        answer = answers.get(size)
        if answer is None:
            answer = answers[size] = self._ask(setup, size)
        return answer

    def _ask(self, setup: TrainingSetup, size: int) -> Estimate:
        """The estimate of one size of what the goal makes large."""
        if not self.stretches:
            return estimate(self.model, self.sized(setup, size), self.gpu)
        if self.goal.global_batch_size is not None:
            setup = with_global_batch(setup, self.goal.global_batch_size)
        if self.goal.objective is Objective.LAYERS:
            return estimate(with_layers(self.model, size), setup, self.gpu)
        # A setup that was looked at before has the target length that went with its own.
        target = self.goal.base.target_seq_len
        longer = replace(setup, seq_len=size * SEQ_LEN_STEP, target_seq_len=target)
        return estimate(self.model, longer, self.gpu)

    def sized(self, setup: TrainingSetup, size: int) -> TrainingSetup:
        """The setup with a micro-batch of that size."""
        return sized(setup, size, self.goal.global_batch_size)

    def _limit(self) -> int:
        """The largest size to look at."""
        if self.goal.objective is Objective.LAYERS:
            return most(self.model, Quantity.LAYERS)
        if self.goal.objective is Objective.SEQ_LEN:
            return most(self.model, Quantity.SEQ_LEN) // SEQ_LEN_STEP
        return MAX_MICRO_BATCH

    def room_bytes(self, num_gpus: int) -> int:
        """What may be allocated at most of a card [bytes]."""
        overhead = overhead_range(self.gpu.compute_capability, num_communicators=int(num_gpus > 1))
        return self.limit_bytes - overhead.high

    def sizes_of(self, setup: TrainingSetup) -> list[int]:
        """The micro-batches that make up the global batch; without one, there is no list."""
        total = self.goal.global_batch_size
        if total is None:
            return []
        if total % setup.data_parallel:
            msg = (
                f"global_batch_size: {total} sequences cannot be spread evenly over "
                f"{setup.data_parallel} data-parallel ranks"
            )
            raise SetupError(msg)
        return divisors(total // setup.data_parallel)

    def largest(self, candidate: Candidate, first: int | None) -> int | None:
        """The size that a plan tells of a candidate, a likely one being looked at first; None: not even the smallest fits."""
        setup = candidate.setup
        if self.goal.global_batch_size is not None and not self.stretches:
            return self._of_global_batch(setup, partial(self._size_fits, setup))
        key = likeness(candidate)
        search = self._search(setup)
        best = search.run(first=first or self._last.get(key, 1), limit=self._limit())
        self._last[key] = max(best, 1)
        return best or None

    def most_allocated(self, candidate: Candidate, first: int | None) -> int | None:
        """The largest size that can fit by what it allocates, for which nothing is replayed; None: none does."""
        setup = candidate.setup
        if self.goal.global_batch_size is not None:
            return self._of_global_batch(setup, partial(self._size_is_allocated, setup))
        key = likeness(candidate)
        most_fitting = self._search(setup).most(
            first=first or self._last.get(key, 1), limit=self._limit()
        )
        self._last[key] = max(most_fitting, 1)
        return most_fitting or None

    def _of_global_batch(self, setup: TrainingSetup, has_room: Callable[[int], bool]) -> int | None:
        """Of the micro-batches that make up the global batch the one that a plan tells; None: there is room for none."""
        sizes = self.sizes_of(setup)
        if setup.pipeline_parallel > 1:
            return self._fastest_of(setup, sizes, has_room)
        if has_room(sizes[-1]):
            # Without accumulation no whole gradients wait: it may fit where smaller ones do not.
            return sizes[-1]
        return largest_of(sizes, has_room)

    def _search(self, setup: TrainingSetup) -> SizeSearch:
        return SizeSearch(
            lambda size: self._known(self.estimate(setup, size)),
            self.limit_bytes,
            looks_beyond=self.goal.objective is Objective.SEQ_LEN,
            grows_activations=self.goal.objective is not Objective.LAYERS,
            ram_room=self._ram_room,
        )

    def _fastest_of(
        self, setup: TrainingSetup, sizes: list[int], has_room: Callable[[int], bool]
    ) -> int | None:
        """The micro-batch with which a pipeline is fastest: large ones leave it few to be filled with."""
        full = setup.resolve(self.model.context_length)
        speeds: dict[int, float] = {}
        for size in sizes:
            with suppress(SetupError):  # micro-batches that are too few for the stages
                cut = sized(full, size, self.goal.global_batch_size)
                speeds[size] = setup_speed(
                    cut, self.model, self.gpu, self.sizes, trainable_params=self.sizes.num_params
                ).per_gpu
        failed = MAX_MICRO_BATCH
        for size in sorted(speeds, key=lambda each: (-speeds[each], each)):
            if size >= failed:
                continue
            if has_room(size):
                return size
            failed = size
        return None

    def _size_fits(self, setup: TrainingSetup, size: int) -> bool:
        """Whether a size fits, what it holds at least being looked at first."""
        if self.is_beyond_bounds(self.sized(setup, size)):
            return False
        return self.fits(self.estimate(setup, size))

    def _size_is_allocated(self, setup: TrainingSetup, size: int) -> bool:
        """Whether there is room for what a size allocates, for which nothing is replayed: else it does not fit."""
        if self.is_beyond_bounds(self.sized(setup, size)):
            return False
        return most_room(self._known(self.estimate(setup, size)), self.limit_bytes) >= 0

    def is_beyond_bounds(self, setup: TrainingSetup) -> bool:
        """Whether what it holds at least is more than there is."""
        least: float = least_bytes(self.model, setup, self.gpu)
        if setup.pipeline_parallel == 1:
            least += resident_floor(setup, self.sizes) + waiting_floor(setup, self.sizes)
        else:
            least = max(least, self.best_first.at_least(setup))
        return least > self.room_bytes(setup.num_gpus)

    def _known(self, answer: Estimate) -> Estimate:
        """The answer, of which it can be said whether it fits.

        Raises ``SetupError`` where the figure is a lower bound that would fit.
        """
        if answer.unmodelled and not answer.is_beyond(self.limit_bytes):
            msg = (
                f"{self.model.name}: left out of its figures are {', '.join(answer.unmodelled)}: "
                "no setup can be said to fit; memplan estimate and sweep give what is counted"
            )
            raise SetupError(msg)
        return answer

    def fits(self, answer: Estimate) -> bool:
        """Whether the card has what it needs, and what is to stay free."""
        return self._known(answer).fits_within(self.limit_bytes)

    def node_bytes(self, answer: Estimate) -> int | None:
        """CPU RAM of a node, a usual one's where nobody says; None: nobody knows [bytes]."""
        node = self.goal.node_memory_bytes
        return node if node is not None else usual_node_bytes(answer.setup, self.gpu)

    def is_short_of_ram(self, answer: Estimate) -> bool:
        """Whether a node's CPU RAM is not enough for it."""
        room = self._ram_room(answer)
        return room is not None and room < 0

    def _ram_room(self, answer: Estimate) -> int | None:
        """What is left of it [bytes]."""
        node = self.node_bytes(answer)
        return None if node is None else node - answer.host_bytes

    def no_larger(self, fitting: Estimate, setup: TrainingSetup) -> Estimate:
        """What fits, with a micro-batch no larger than that of a setup which does not."""
        size = 1 if self.stretches else setup.micro_batch_size
        if not self.stretches and fitting.setup.micro_batch_size <= size:
            return fitting
        return self._ask(fitting.setup, size)


def likeness(candidate: Candidate) -> tuple[object, ...]:
    """What has about the same largest micro-batch on any number of GPUs."""
    setup = candidate.setup
    return (
        candidate.variant, candidate.given_up, candidate.tier, setup.precision,
        setup.checkpointing, degrees_of(setup),
    )  # fmt: skip


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]
