"""The best of a large space without looking at all of it: bounds first, estimates where these leave it open.

What a setup holds at least says how large a micro-batch can be, and that how fast it can be at most. A
queue has every combination at the best place that it can take; the first one is looked at more closely
(arithmetic, then a walk of the model, then estimates) and goes back to the place that it then has, until
one comes out that is as good as it seemed: no other is better. That is A* (Hart, Nilsson and Raphael, 1968).
"""

from collections.abc import Callable, Iterable
from enum import IntEnum, auto
from heapq import heappop, heappush
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.estimator import walked_bytes
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.planning.degrees import degrees_of
from memplan.search.planning.floors import (
    activations_floor,
    in_flight_share,
    resident_floor,
    states_floor,
    waiting_floor,
)
from memplan.search.planning.goal import Goal, PlannedSetup
from memplan.search.planning.order import rank_of
from memplan.search.planning.sizes import ModelSizes
from memplan.search.planning.space import Candidate
from memplan.search.planning.speed import setup_speed
from memplan.training.setup import TrainingSetup

MOST_LOOKED_AT = 30
"""Combinations of which estimates are made, for one number of GPUs: then the best so far count."""

Find = Callable[[Candidate, int], PlannedSetup | None]
"""Looks for a candidate's largest micro-batch from a likely size on; None where not even 1 fits. It may be left open
whether a replay bears it out."""
Settle = Callable[[PlannedSetup], PlannedSetup | None]
"""Has it borne out: the same, or with a smaller micro-batch; None where not even 1 fits. Of the first one, which others are
measured by, whether it flushes may be known too."""
IsBeaten = Callable[[tuple[float, ...]], bool]
"""Whether a place is no better than that of something known: no further one is then either."""
Sizes = Callable[[TrainingSetup], list[int]]
"""The micro-batches that a global batch may be cut into; none where there is no global batch."""


class _Known(IntEnum):
    """How closely a combination was looked at."""

    ARITHMETIC = auto()
    WALK = auto()
    ESTIMATES = auto()


class _Open(NamedTuple):
    rank: tuple[float, ...]
    """The best place that it can take."""
    number: int
    known: _Known
    candidate: Candidate
    size: int
    """The largest micro-batch that it can have."""
    found: PlannedSetup | None


class BestFirst:
    """Searches the candidates of one number of GPUs after another; walks are remembered."""

    def __init__(self, goal: Goal, model: ModelSpec, gpu: GpuSpec, sizes: ModelSizes) -> None:
        self.goal = goal
        self.model = model
        self.gpu = gpu
        self.sizes = sizes
        self.refused: dict[str, None] = {}
        """Why models cannot be split so, each reason once."""
        self.num_ruled_out = 0
        """Combinations that hold more than there is by bounds alone."""
        self._walked: dict[tuple[object, ...], tuple[int, int] | None] = {}

    def search(
        self,
        candidates: Iterable[Candidate],
        find: Find,
        settle_first: Settle,
        settle: Settle,
        sizes: Sizes,
        *,
        room_bytes: int,
        wanted: int,
        is_beaten: IsBeaten,
    ) -> list[PlannedSetup]:
        """The best ones, best first: as many as are wanted, and only such as are not beaten.

        The first is settled; further ones may be left open until they are told. Not so of a global batch: the next
        size that it can be cut into is far, and what is not borne out falls behind others.
        """
        settles_all = self.goal.global_batch_size is not None
        queue: list[_Open] = []
        for number, candidate in enumerate(candidates):
            first = self._opened(candidate, number, sizes, room_bytes)
            if first is not None:
                heappush(queue, first)
        accepted: list[PlannedSetup] = []
        looked_at = 0
        while queue and len(accepted) < wanted:
            head = heappop(queue)
            if is_beaten(head.rank):
                break
            if head.found is not None:
                if not accepted:
                    settled = settle_first(head.found)
                else:
                    settled = settle(head.found) if settles_all else head.found
                if settled is head.found:
                    accepted.append(settled)
                elif settled is not None:
                    heappush(queue, self._estimated(head, settled))
            elif looked_at >= MOST_LOOKED_AT:
                continue
            elif head.known is _Known.ARITHMETIC:
                closer = self._walk(head, sizes, room_bytes)
                if closer is not None:
                    heappush(queue, closer)
            else:
                looked_at += 1
                found = find(head.candidate, head.size)
                if found is not None:
                    heappush(queue, self._estimated(head, found))
        return accepted

    def _opened(
        self, candidate: Candidate, number: int, sizes: Sizes, room_bytes: int
    ) -> _Open | None:
        """A candidate as arithmetic has it; None where it cannot fit."""
        setup = candidate.setup.resolve(self.model.context_length)
        candidate = replace(candidate, setup=setup)
        if states_floor(setup, self.sizes) > room_bytes:
            self.num_ruled_out += 1
            return None
        return self._bounded(candidate, number, _Known.ARITHMETIC, room_bytes, sizes)

    def _walk(self, head: _Open, sizes: Sizes, room_bytes: int) -> _Open | None:
        """The same as a walk of the model has it."""
        setup = head.candidate.setup
        kept = self._kept(setup, 1)
        if kept is None and setup.sequence_parallel:
            # Some layers have no rule for shares of sequences: then between them each rank has all.
            setup = replace(setup, sequence_parallel=False)
            head = head._replace(candidate=replace(head.candidate, setup=setup))
            kept = self._kept(setup, 1)
        if kept is None:
            return None
        return self._bounded(head.candidate, head.number, _Known.WALK, room_bytes, sizes)

    def at_least(self, setup: TrainingSetup) -> float:
        """What a setup with every default filled in holds at its fullest, as a walk has it; at least [bytes]."""
        kept = self._kept(setup, setup.micro_batch_size)
        return 0.0 if kept is None else self._held(setup, *kept)

    def _held(self, setup: TrainingSetup, layers: float, whole: float) -> float:
        """The same, with what layers keep of a micro-batch and the most that it takes."""
        if setup.pipeline_parallel > 1:
            whole = layers * in_flight_share(setup, self.sizes.num_layers)
        return resident_floor(setup, self.sizes) + waiting_floor(setup, self.sizes) + whole

    def _needed(self, setup: TrainingSetup, known: _Known) -> float:
        """What is known of it so far; at least [bytes]."""
        if known is _Known.ARITHMETIC:
            return resident_floor(setup, self.sizes) + activations_floor(setup, self.sizes)
        return self._held(setup, *self._kept_at_least(setup))

    def _kept_at_least(self, setup: TrainingSetup) -> tuple[float, float]:
        """The same as ``_kept`` of its micro-batch, from walks of one and two sequences.

        A peak is the largest of many moments, each of which takes a fixed share and one by the sequence: it is convex
        in their number, and so never below the line through the first two.
        """
        first = self._kept(setup, 1) or (0, 0)
        further = setup.micro_batch_size - 1
        if further == 0:
            return first
        second = self._kept(setup, 2) or first
        layers, whole = (
            one + further * (two - one) for one, two in zip(first, second, strict=True)
        )
        return layers, whole

    def _kept(self, setup: TrainingSetup, size: int) -> tuple[int, int] | None:
        """What so many sequences keep of all layers, and the most they take; None where it cannot be [bytes]."""
        degrees = degrees_of(setup)
        key = (
            setup.engine, setup.zero_stage, setup.fsdp_strategy, setup.precision,
            setup.checkpointing, setup.sequence_parallel, degrees.tensor, degrees.context,
            degrees.expert, setup.adapter, setup.quantize, size,
        )  # fmt: skip
        if key not in self._walked:
            alone = replace(
                setup, micro_batch_size=size, gradient_accumulation_steps=1, pipeline_parallel=1,
                virtual_stages=1, pipeline_schedule=None, layers_per_stage=None, num_nodes=None,
                num_gpus=setup.num_gpus // setup.pipeline_parallel,
            )  # fmt: skip
            try:
                self._walked[key] = walked_bytes(self.model, alone, self.gpu)
            except SetupError as error:
                self.refused[str(error)] = None
                self._walked[key] = None
        return self._walked[key]

    def _bounded(
        self,
        candidate: Candidate,
        number: int,
        known: _Known,
        room_bytes: int,
        sizes: Sizes,
    ) -> _Open | None:
        """The best place with a micro-batch that bounds allow."""
        try:
            asked = sizes(candidate.setup)
        except SetupError as error:
            self.refused[str(error)] = None
            return None
        if not asked:
            most = self._most(sized(candidate.setup, 1, None), known, room_bytes)
            asked = [most] if most >= 1 else []
        is_ruled_out = True
        places: list[tuple[tuple[float, ...], int]] = []
        for size in asked:
            cut = self._sized(candidate, size)
            if cut is None:
                is_ruled_out = False
            elif self._needed(cut, known) <= room_bytes:
                is_ruled_out = False
                places.append((self._rank(candidate, cut), size))
        self.num_ruled_out += is_ruled_out
        if not places:
            return None
        rank, size = min(places)
        return _Open(rank, number, known, candidate, size, None)

    def _most(self, setup: TrainingSetup, known: _Known, room_bytes: int) -> int:
        """The largest micro-batch that what is known allows a setup with one of 1; below 1 where that is too large."""
        first = self._needed(setup, known)
        if known is _Known.ARITHMETIC:
            further = activations_floor(setup, self.sizes)
        else:
            further = self._needed(sized(setup, 2, None), known) - first
        return 1 + int((room_bytes - first) // max(1.0, further))

    def _sized(self, candidate: Candidate, size: int) -> TrainingSetup | None:
        """With a micro-batch of that size; None where too few are left for its stages."""
        try:
            return sized(candidate.setup, size, self.goal.global_batch_size)
        except SetupError as error:
            self.refused[str(error)] = None
            return None

    def _rank(self, candidate: Candidate, setup: TrainingSetup) -> tuple[float, ...]:
        speed = setup_speed(
            setup, self.model, self.gpu, self.sizes, trainable_params=self.sizes.num_params
        )
        return rank_of(self.goal, candidate, setup, speed.per_gpu, self.model.num_layers)

    def _estimated(self, head: _Open, found: PlannedSetup) -> _Open:
        rank = rank_of(self.goal, found, found.setup, found.speed.per_gpu, self.model.num_layers)
        return _Open(rank, head.number, _Known.ESTIMATES, head.candidate, head.size, found)


def sized(setup: TrainingSetup, size: int, global_batch_size: int | None) -> TrainingSetup:
    """The setup with a micro-batch, and as many steps as make up the global batch where there is one."""
    steps = setup.gradient_accumulation_steps
    if global_batch_size is not None:
        steps = global_batch_size // (size * setup.data_parallel)
    steps = max(1, steps)
    if (size, steps) == (setup.micro_batch_size, setup.gradient_accumulation_steps):
        return setup
    return replace(setup, micro_batch_size=size, gradient_accumulation_steps=steps)
