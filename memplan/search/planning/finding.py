"""A candidate of a plan with its largest micro-batch, or what it lacks for one."""

from collections.abc import Callable
from typing import NamedTuple

from memplan.errors import SetupError
from memplan.estimator import Estimate
from memplan.fast_dataclass import replace
from memplan.search.changed_setups import lean_kernels
from memplan.search.planning.goal import PlannedSetup
from memplan.search.planning.sizing import Sizing, likeness
from memplan.search.planning.space import Candidate
from memplan.search.planning.speed import setup_speed
from memplan.training.setup import TrainingSetup


class Failed(NamedTuple):
    """What does not fit, even with the smallest size."""

    candidate: Candidate
    setup: TrainingSetup
    """With that size."""
    find_estimate: Callable[[], Estimate]
    """What it needs."""


class Finder:
    """Finds setups that fit, and keeps those that do not."""

    def __init__(self, sizing: Sizing, refused: dict[str, None]) -> None:
        self.sizing = sizing
        self.goal = sizing.goal
        self.model = sizing.model
        self.gpu = sizing.gpu
        self.sizes = sizing.sizes
        self.refused = refused
        """Why combinations cannot be, each reason once."""
        self.failed: list[Failed] = []
        self.possible: set[tuple[object, ...]] = set()
        """Ways to train of which an estimate was made, by everything but the number of GPUs."""
        self.held_by_nodes: set[tuple[object, ...]] = set()
        """Those of them that a node's CPU RAM is enough for, by how many GPUs a node has too."""
        self.overfilling: list[Estimate] = []
        self.open: dict[int, Candidate] = {}
        """Of setups whose micro-batch is the largest by what they allocate, by their estimate: no replay bore it out."""

    def opened(self, candidate: Candidate, first: int | None = None) -> PlannedSetup | None:
        """A candidate with the largest micro-batch that it can have; ``first``: a likely one.

        Whether a replay bears that out is left open until it matters; of a global batch, which few sizes make up, where
        it surely fits with the smallest.
        """
        return self._opened(candidate, first, is_settled=False)

    def opened_to_settle(
        self, candidate: Candidate, first: int | None = None
    ) -> PlannedSetup | None:
        """The same of one that is settled before it is kept, and of which nobody is told where it does not fit."""
        return self._opened(candidate, first, is_settled=True)

    def _opened(
        self, candidate: Candidate, first: int | None, *, is_settled: bool
    ) -> PlannedSetup | None:
        try:
            if self._is_limited(candidate):
                if self._overfills_node(self.sizing.estimate(candidate.setup, 1)):
                    return None
                self.held_by_nodes.add(_on_nodes(candidate))
            found = self._left_open(candidate, first, is_settled=is_settled)
        except SetupError as error:
            self.refused[str(error)] = None
            return None
        return self.find(candidate, first) if found is None else found

    def surely_fits_some(self, candidate: Candidate) -> bool:
        """Whether it fits with a micro-batch for which nothing has to be replayed."""
        smallest = self.sizing.estimate(candidate.setup, 1)
        is_free = self.sizing.node_bytes(smallest) is None
        return is_free and smallest.surely_fits_within(self.sizing.limit_bytes)

    def is_known_to_be(self, candidate: Candidate) -> bool:
        """Whether such a one can be, and nodes have the CPU RAM for it: on fewer GPUs they had.

        With more of them a node's share of what is spread is smaller, and what each rank has for itself the same.
        """
        if likeness(candidate) not in self.possible:
            return False
        return not self._is_limited(candidate) or _on_nodes(candidate) in self.held_by_nodes

    def _is_limited(self, candidate: Candidate) -> bool:
        """Whether a node's CPU RAM is looked at."""
        return self.goal.node_memory_bytes is not None or candidate.variant.offloads

    def opened_alone(self, candidate: Candidate, first: int) -> PlannedSetup | None:
        """The same of one in another's place: where it does not fit, nobody is told."""
        if self._is_too_large(candidate):
            return None
        found = self._left_open(candidate, first)
        if found is not None:
            return found
        best = self.sizing.largest(candidate, first)
        answer = self.sizing.estimate(candidate.setup, best) if best is not None else None
        if answer is None or self._overfills_node(answer):
            return None
        return self.planned(candidate, answer)

    def _left_open(
        self, candidate: Candidate, first: int | None, *, is_settled: bool = False
    ) -> PlannedSetup | None:
        """A candidate with the largest micro-batch by what it allocates; None: that is to be looked at at once."""
        if self.sizing.stretches or self._is_too_large(candidate):
            return None
        is_sure = is_settled or self.goal.global_batch_size is None
        if not is_sure and not self.surely_fits_some(candidate):
            return None
        most = self.sizing.most_allocated(candidate, first)
        if most is None:
            return None
        answer = self.sizing.estimate(candidate.setup, most)
        if self.sizing.is_short_of_ram(answer):
            return None
        found = self.planned(candidate, answer)
        self.open[id(found.estimate)] = candidate
        return found

    def find(self, candidate: Candidate, first: int | None = None) -> PlannedSetup | None:
        """A candidate with its largest micro-batch; ``first``: a likely one."""
        try:
            if self._is_too_large(candidate):
                lean = self._lean(candidate)
                if lean is None:
                    self.fail_untold(candidate)
                return lean
            best = self.sizing.largest(candidate, first)
            if best is None:
                smallest = self.sizing.estimate(candidate.setup, 1)
                has_room = smallest.held_bytes <= self.sizing.room_bytes(candidate.setup.num_gpus)
                lean = self._lean(candidate) if has_room else None
                if lean is None:
                    self.fail(candidate, smallest)
                return lean
            answer = self.sizing.estimate(candidate.setup, best)
            if self._overfills_node(answer):
                return None
        except SetupError as error:
            self.refused[str(error)] = None
            return None
        return self.planned(candidate, answer)

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether bounds alone deny it with the smallest micro-batch; that it can be at all is known.

        Of a global batch a larger one may do with less: without accumulation no whole gradients wait.
        """
        if self.sizing.stretches or self.goal.global_batch_size is not None:
            return False
        if likeness(candidate) not in self.possible:
            return False
        return self.sizing.is_beyond_bounds(self.sizing.sized(candidate.setup, 1))

    def fail_untold(self, candidate: Candidate) -> None:
        """A candidate does not fit; how much it needs is looked at when somebody asks."""
        setup = self.sizing.sized(candidate.setup, 1)
        self.failed.append(
            Failed(candidate, setup, lambda: self.sizing.estimate(candidate.setup, 1))
        )

    def fail(self, candidate: Candidate, smallest: Estimate) -> None:
        """A candidate does not fit, even with the smallest size."""
        self.possible.add(likeness(candidate))
        self.failed.append(Failed(candidate, smallest.setup, lambda: smallest))

    def planned(self, like: Candidate | PlannedSetup, answer: Estimate) -> PlannedSetup:
        """An answer as one of the plan's setups."""
        sizes = replace(self.sizes, num_params=answer.num_params)
        return PlannedSetup(
            estimate=answer,
            speed=setup_speed(
                answer.setup, answer.model, self.gpu, sizes,
                trainable_params=answer.trainable_params,
            ),
            given_up=like.given_up,
            tier=like.tier,
            simplicity=like.simplicity,
        )  # fmt: skip

    def _lean(self, candidate: Candidate) -> PlannedSetup | None:
        """The same with kernels that never have all logits."""
        for setup in lean_kernels(self.model, candidate.setup, self.gpu):
            try:
                found = self.opened_alone(replace(candidate, setup=setup), 1)
            except SetupError:
                continue
            if found is not None:
                return found
        return None

    def _overfills_node(self, answer: Estimate) -> bool:
        """Whether a node's CPU RAM, a usual one's where nobody says, is not enough for it; then it is kept."""
        if not self.sizing.is_short_of_ram(answer):
            return False
        node = self.sizing.node_bytes(answer)
        self.overfilling.append(replace(answer, node_memory_bytes=node))
        return True


def _on_nodes(candidate: Candidate) -> tuple[object, ...]:
    """What candidates share of which each node has as many ranks that are alike."""
    return (*likeness(candidate), candidate.setup.gpus_per_node)
