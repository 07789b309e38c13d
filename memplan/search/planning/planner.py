"""From a model, a GPU and a goal to the setups that fit, best first.

The space: numbers of GPUs x engine, stage and offload x precision x parallel degrees x
checkpointing, each with the largest micro-batch that fits. Offloading is tried where the same engine does not fit without it, and
less recomputation where more of it fits. Unsplit models are tried in every way; of the many ways to split one the best
are looked for (``BestFirst``).
"""

from collections.abc import Iterable
from functools import cache, partial

from memplan.errors import SetupError
from memplan.estimator import Estimate
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.batch import largest_of
from memplan.search.changed_setups import lean_kernels
from memplan.search.patience import PATIENT
from memplan.search.planning.best_first import BestFirst
from memplan.search.planning.concessions import Concession
from memplan.search.planning.degrees import Degrees, check_degrees, degrees_of, every_degree
from memplan.search.planning.finding import Failed, Finder
from memplan.search.planning.floors import is_known, states_floor
from memplan.search.planning.goal import (
    EngineVariant,
    Goal,
    Objective,
    Plan,
    PlannedSetup,
    Shortfall,
)
from memplan.search.planning.order import distance, rank_of
from memplan.search.planning.sizes import model_sizes
from memplan.search.planning.sizing import Sizing
from memplan.search.planning.space import Candidate, Loss, Space, losses
from memplan.search.planning.speed import (
    ASSUMPTIONS,
    MIXTURE_ASSUMPTIONS,
    SPLIT_ASSUMPTIONS,
)
from memplan.training.setup import TrainingSetup

SPLIT_SETUPS = 3
"""Ways to split a model over so many GPUs that are told where no degrees are named."""
LEAN_TRIED = 3
"""Of the best setups, so many are looked at with leaner kernels too."""
HOPELESS = 2
"""How many times a card's memory states alone take where no estimate is made of what else they do."""


def plan(
    model: ModelSpec,
    goal: Goal,
    gpu: GpuSpec,
    *,
    times: TimeQuestion | None = None,
    stoppable: bool = False,
) -> Plan:
    """Search for the setups that reach a goal on one kind of GPU; by their times where these are asked for.

    ``stoppable``: an interruption ends the search, and the plan is of what was found by then.

    Raises ``SetupError`` where no combination of the goal's settings exists, and ``KeyboardInterrupt`` where
    nothing was found before it.
    """
    with PATIENT:
        return Planner(model, goal, gpu, times).run(stoppable=stoppable)


class Planner:
    """Walks the space of one goal."""

    def __init__(
        self, model: ModelSpec, goal: Goal, gpu: GpuSpec, times: TimeQuestion | None = None
    ) -> None:
        self.model = model
        self.times = times
        self.goal = goal
        self.gpu = gpu
        self.sizes = model_sizes(model)
        self.space = Space(goal, gpu, model)
        self.best_first = BestFirst(goal, model, gpu, self.sizes)
        self.sizing = Sizing(goal, model, gpu, self.best_first)
        self.found: list[PlannedSetup] = []
        self.losses = losses(goal)
        """What may be given up and was not tried yet, the least first."""
        self.refused = self.space.refused
        self.finder = Finder(self.sizing, self.refused)
        self.num_ruled_out = 0
        self.borne_out: dict[int, PlannedSetup | None] = {}
        """What became of these, once a replay was asked; None: not even one sequence fits."""
        self.waiting: dict[object, list[Candidate]] = {}
        """What is offloaded, by what fits without it as far as that is known."""

    def run(self, *, stoppable: bool = False) -> Plan:
        """Try everything, rank what fits, and say what the rest lacks."""
        check_degrees(self.goal.degrees, self.goal.num_gpus, self.sizes, self.model.name)
        try:
            ranked, front = self._look_through()
        except KeyboardInterrupt:
            self.found = [each for each in self.found if id(each.estimate) not in self.finder.open]
            if not (stoppable and self.found):
                raise
            # What falls short was not looked at whole, and saying what it lacks takes as long again.
            self.finder.failed.clear()
            ranked = self._ranked()
            return replace(self._plan_of(ranked, self._front(ranked)), is_interrupted=True)
        return self._plan_of(ranked, front)

    def _look_through(self) -> tuple[list[PlannedSetup], list[PlannedSetup]]:
        """Try every number of GPUs in every way, then the best of them with leaner kernels; what fits, and the front."""
        counts = self._counts()
        while self._try_more(counts):
            pass
        if not (self.found or self.finder.failed or self.finder.overfilling):
            if self.num_ruled_out or self.best_first.num_ruled_out:
                self._try_smallest()
            if not self.finder.failed:
                reasons = (*self.refused, *self.best_first.refused)
                raise SetupError(next(iter(reasons), "the goal leaves nothing to try"))
        self._add_lean_kernels()
        told = self._told_of()
        while self._try_more(counts):
            told = self._told_of()
        return told

    def _plan_of(self, ranked: list[PlannedSetup], front: list[PlannedSetup]) -> Plan:
        """The answer: what fits in its order, and what the rest lacks."""
        return Plan(
            goal=self.goal,
            gpu=self.gpu,
            setups=tuple(self._told(each) for each in self._shown_of(ranked)),
            num_fitting=len(self.found),
            front=tuple(front),
            shortfalls=tuple(self._shortfall(each, ranked) for each in self.finder.failed),
            overfilling=tuple(self.finder.overfilling),
            refused=tuple(self.refused),
            num_ruled_out=self.num_ruled_out + self.best_first.num_ruled_out,
            assumptions=(*self.model.assumptions, *ASSUMPTIONS, *self._split_assumptions(ranked)),
        )

    # -- the space -------------------------------------------------------------------------------

    def _try_more(self, counts: list[int]) -> bool:
        """Try what gives up more than what was tried so far, on numbers of GPUs that want for setups.

        What gives up less comes first in a plan: where that is enough, the rest is not looked at. Returns False where
        it is, or nothing is left.
        """
        lacking = [each for each in counts if self._lacks(each)]
        if not lacking or not self.losses:
            return False
        loss = self.losses.pop(0)
        for num_gpus in lacking:
            plain, split = self._degrees(num_gpus)
            self._try_all(num_gpus, plain, loss)
            self._try_best(num_gpus, split, loss)
        return True

    def _lacks(self, num_gpus: int) -> bool:
        """Whether a plan would tell more setups, or one on so many GPUs."""
        quick = [each for each in self.found if not (each.offloads and self.goal.allow)]
        return len(quick) < self.goal.limit or all(
            each.setup.num_gpus != num_gpus for each in quick
        )

    def _counts(self) -> list[int]:
        """Numbers of GPUs to try: of several, those that are whole nodes."""
        counts = self.goal.num_gpus
        whole = [each for each in counts if self._is_spread(each)]
        if not whole:
            return list(counts)  # trying them says why
        left = [str(each) for each in counts if each not in whole]
        if left:
            self.refused[f"{', '.join(left)} GPUs, which cannot be spread evenly over nodes"] = None
        return whole

    def _is_spread(self, num_gpus: int) -> bool:
        """Whether so many GPUs are as many on each node."""
        try:
            replace(TrainingSetup(), num_gpus=num_gpus, num_nodes=self.goal.num_nodes(num_gpus))
        except SetupError:
            return False
        return True

    def _degrees(self, num_gpus: int) -> tuple[list[Degrees], list[Degrees]]:
        """Degrees of which every combination is tried, and those of which the best are."""
        base, asked = self.goal.base, self.goal.degrees
        own = degrees_of(base)
        if not asked.any and (own != Degrees() or not self._may_choose_degrees(num_gpus)):
            return [own], []
        if self.sizing.stretches:
            asked = asked.fixed_on(base)
        found = list(every_degree(asked, self._full_base(), num_gpus, self.sizes))
        if self.sizing.stretches:
            return found, []
        return [each for each in found if each == Degrees()], [
            each for each in found if each != Degrees()
        ]

    def _full_base(self) -> TrainingSetup:
        seq_len = self.goal.base.resolve(self.model.context_length).seq_len
        return replace(self.goal.base, seq_len=seq_len)

    def _may_choose_degrees(self, num_gpus: int) -> bool:
        """Whether models are split that nobody asked to be: several GPUs, and all that is held is known."""
        return num_gpus > 1 and not self.sizing.stretches and is_known(self.goal.base)

    def _try_all(self, num_gpus: int, degrees: list[Degrees], loss: Loss) -> None:
        """Try every combination of these degrees."""
        fitting: set[tuple[object, ...]] = set()
        hopeless: set[tuple[object, ...]] = set()
        for candidate in self.space.candidates(num_gpus, degrees, loss):
            key = candidate.without_offload
            if candidate.variant.offloads and key in fitting and not self.sizing.stretches:
                self.waiting.setdefault(_way(candidate), []).append(candidate)
                continue
            own = candidate.way
            if own in hopeless:
                continue
            if self._is_hopeless(candidate):
                hopeless.add(own)
                continue
            if self._try(candidate):
                fitting.add(key)
            else:
                hopeless.add(own)

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether states alone are beyond the card: such as are far beyond it are counted, the others are told.

        How much these need is looked at when somebody asks. That they can be at all was seen on another number of GPUs.
        """
        if self.goal.objective is Objective.LAYERS:
            return False  # fewer of them hold less
        floor = states_floor(candidate.setup, self.sizes)
        if floor > HOPELESS * self.gpu.capacity_bytes:
            self.num_ruled_out += 1
            return True
        if floor <= self.sizing.limit_bytes or not self.finder.is_known_to_be(candidate):
            return False
        self.finder.fail_untold(candidate)
        return True

    def _try_best(self, num_gpus: int, degrees: list[Degrees], loss: Loss) -> None:
        """Look for the best combinations of these degrees: such as beat an unsplit model, unless
        they were asked for."""
        if not degrees:
            return
        asked = self.goal.degrees.any
        if not asked and loss.given_up is not Concession.NONE:
            return
        has_unsplit = self._best_unsplit(num_gpus) is not None
        candidates = (
            each
            for each in self.space.candidates(num_gpus, degrees, loss, is_full=True)
            if not each.variant.offloads
        )
        known, reasons = len(self.finder.failed), dict(self.refused)
        found = self.best_first.search(
            candidates,
            self.finder.opened if asked else self.finder.opened_to_settle,
            self._borne_out if self.goal.global_batch_size is None else self._calm_and_borne_out,
            self._borne_out,
            self.sizing.sizes_of,
            room_bytes=self.sizing.room_bytes(num_gpus),
            wanted=self.goal.limit if asked else SPLIT_SETUPS,
            is_beaten=lambda rank: not asked and self._is_beaten(rank, num_gpus),
        )
        if (found or has_unsplit) and not asked:
            # Of ways that nobody asked for, what cannot be is no news.
            del self.finder.failed[known:]
            self.refused.clear()
            self.refused.update(reasons)
        self.found += found

    def _is_beaten(self, rank: tuple[float, ...], num_gpus: int) -> bool:
        """Whether a place is none before that of an unsplit model, which is borne out where it turns on that."""
        while True:
            best = self._best_unsplit(num_gpus)
            if best is None:
                return False
            own = self._rank(best)
            if rank[: len(own)] < own:
                return False  # borne out, its own place is no better
            if id(best.estimate) not in self.finder.open:
                return True
            self._settle(best)

    def _best_unsplit(self, num_gpus: int) -> PlannedSetup | None:
        """The best of those that do not split the model over so many GPUs, which surely fits with some micro-batch; None: there is none."""
        while True:
            own = [
                each for each in self.found if each.setup.num_gpus == num_gpus and not each.offloads
            ]
            best = min(own, key=self._rank, default=None)
            if best is None or self._surely_fits_some(best):
                return best
            self._settle(best)

    def _surely_fits_some(self, each: PlannedSetup) -> bool:
        """Whether a setup fits with a micro-batch, be it a smaller one than its own."""
        candidate = self.finder.open.get(id(each.estimate))
        if candidate is None:
            return True
        return self.finder.surely_fits_some(candidate)

    def _try_smallest(self) -> None:
        """Estimate what holds least by bounds, where all were ruled out: so much is missing at least."""
        num_gpus = max(self.goal.num_gpus)
        plain, split = self._degrees(num_gpus)
        every = [*plain, *split]
        candidates = [
            each
            for loss in losses(self.goal)
            for each in self.space.candidates(num_gpus, every, loss)
        ]
        floors = sorted(candidates, key=lambda each: states_floor(each.setup, self.sizes))
        for candidate in floors:
            try:
                self.finder.fail(candidate, self.sizing.estimate(candidate.setup, 1))
            except SetupError as error:
                self.refused[str(error)] = None
                continue
            return

    # -- the best of what fits -------------------------------------------------------------------

    def _ranked(self) -> list[PlannedSetup]:
        """What fits, best first."""
        ranked = sorted(self.found, key=self._rank)
        if self.times is None:
            return ranked
        from memplan.search.planning.objective import ranked_by_time  # only then

        return ranked_by_time(ranked, self.goal, self.times)

    def _add_lean_kernels(self) -> None:
        """The best ones once more with kernels that never have all logits, as their code base has them."""
        for each in self._firsts(LEAN_TRIED):
            lean = next(lean_kernels(self.model, each.setup, self.gpu), None)
            if lean is None:
                continue
            try:
                found = self._found(each, lean)
            except SetupError:
                continue
            if found is not None:
                self.found.append(found)

    def _firsts(self, count: int) -> list[PlannedSetup]:
        """So many of the best, all of them borne out."""
        while True:
            self.found = self._ranked()
            each = self._first_open(self.found[:count])
            if each is None:
                return self.found[:count]
            self._settle(each)

    def _told_of(self) -> tuple[list[PlannedSetup], list[PlannedSetup]]:
        """What fits, best first, and the front of memory and time; a replay bears out whatever is told."""
        while True:
            ranked = self._settled()
            front = self._front(ranked)
            each = self._first_open(front)
            if each is None:
                return ranked, front
            self._settle(each)

    def _front(self, ranked: list[PlannedSetup]) -> list[PlannedSetup]:
        if self.times is None:
            return []
        from memplan.search.planning.objective import memory_front  # only then

        return memory_front(ranked, lambda each: id(each.estimate) in self.finder.open)

    def _first_open(self, setups: Iterable[PlannedSetup]) -> PlannedSetup | None:
        return next((each for each in setups if id(each.estimate) in self.finder.open), None)

    def _settled(self) -> list[PlannedSetup]:
        """What fits, best first; of what is shown, nothing flushes the allocator's cache in every step that need not.

        A largest micro-batch may fit only so, and then waits for the GPU each time: a smaller one comes in its place
        where that does without. Where what is looked for is the largest, it stays.
        """
        looked_at: set[int] = set()
        while True:
            ranked = self._ranked()
            self.found = ranked
            shown = self._shown_of(ranked)
            each = next((each for each in shown if id(each.estimate) not in looked_at), None)
            if each is None:
                return ranked
            if id(each.estimate) in self.finder.open:
                self._settle(each)
                continue
            looked_at.add(id(each.estimate))
            calm = self._calmed(each)
            if calm is not each:
                looked_at.add(id(calm.estimate))
                self.found[_place(self.found, each)] = calm

    def _settle(self, each: PlannedSetup) -> None:
        """Have a setup's micro-batch borne out, or one that is takes its place; where none fits, it goes."""
        place = _place(self.found, each)
        settled = self._borne_out(each)
        if settled is not None:
            self.found[place] = settled
            return
        del self.found[place]
        way = _way(each)
        if all(_way(other) != way for other in self.found):
            for candidate in self.waiting.pop(way, ()):
                self._try(candidate)

    def _borne_out(self, each: PlannedSetup) -> PlannedSetup | None:
        """The same where a replay says that it fits, or with the largest micro-batch that does; None: none does."""
        number = id(each.estimate)
        candidate = self.finder.open.get(number)
        if candidate is not None:
            found = self.finder.find(candidate, each.setup.micro_batch_size)
            del self.finder.open[number]
            if found is not None and found.estimate is each.estimate:
                found = each
            elif found is not None:
                found = self._borne_out(found)  # with other kernels, it may be
            self.borne_out[number] = found
        return self.borne_out.get(number, each)

    @property
    def _wants_largest(self) -> bool:
        return self.sizing.stretches or self.goal.objective is Objective.BATCH

    def _calmed(self, each: PlannedSetup) -> PlannedSetup:
        """The same where it flushes nothing; else a smaller one that does not, or it is said of it."""
        if each.flushes or not each.estimate.flushes_every_step:
            return each
        calm = None if self._wants_largest else self._calmer(each)
        return calm or replace(each, flushes=True)

    def _calm_and_borne_out(self, each: PlannedSetup) -> PlannedSetup | None:
        """As it is told: with a micro-batch that fits, and flushes nothing in every step that need not."""
        if each.flushes:
            return each  # looked at before
        settled = self._borne_out(each)
        return None if settled is None else self._calmed(settled)

    def _calmer(self, each: PlannedSetup) -> PlannedSetup | None:
        """The same with the largest micro-batch with which nothing is flushed in every step; None: there is none."""
        setup, largest = each.setup, each.setup.micro_batch_size
        if setup.pipeline_parallel > 1:
            return None
        sizes = [
            size for size in self.sizing.sizes_of(setup) or range(1, largest) if size < largest
        ]
        best = largest_of(
            sizes, lambda size: not self.sizing.estimate(setup, size).flushes_every_step
        )
        if best is None or not self.sizing.fits(self.sizing.estimate(setup, best)):
            return None
        return self.finder.planned(each, self.sizing.estimate(setup, best))

    def _found(self, each: PlannedSetup, setup: TrainingSetup) -> PlannedSetup | None:
        """Another setup in the place of one that fits, with its own largest micro-batch."""
        variant = EngineVariant(engine=setup.chosen_engine)
        candidate = Candidate(
            setup=setup, variant=variant, given_up=each.given_up, simplicity=each.simplicity,
            tier=each.tier,
        )  # fmt: skip
        return self.finder.opened_alone(candidate, setup.micro_batch_size)

    def _shown_of(self, ranked: list[PlannedSetup]) -> list[PlannedSetup]:
        """As many as are wanted, the best of each number of GPUs among them."""
        limit = self.goal.limit
        firsts: dict[int, int] = {}
        for place, each in enumerate(ranked):
            firsts.setdefault(each.setup.num_gpus, place)
        kept = set(sorted(firsts.values())[:limit])
        for place in range(len(ranked)):
            if len(kept) >= limit:
                break
            kept.add(place)
        return [ranked[place] for place in sorted(kept)]

    def _split_assumptions(self, ranked: Iterable[PlannedSetup]) -> tuple[str, ...]:
        split = any(degrees_of(each.setup) != Degrees() for each in ranked)
        mixed = MIXTURE_ASSUMPTIONS if self.sizes.num_experts else ()
        return (*mixed, *SPLIT_ASSUMPTIONS) if split else mixed

    # -- one candidate ---------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> bool:
        """Find the largest micro-batch of a candidate; whether there is one."""
        found = self.finder.opened(candidate)
        if found is not None:
            self.found.append(found)
        return found is not None

    def _told(self, each: PlannedSetup) -> PlannedSetup:
        node = self.goal.node_memory_bytes
        return replace(each, estimate=replace(each.estimate, node_memory_bytes=node))

    # -- the order -------------------------------------------------------------------------------

    def _rank(self, each: PlannedSetup) -> tuple[float, ...]:
        layers = each.estimate.model.num_layers
        return rank_of(self.goal, each, each.setup, each.speed.per_gpu, layers)

    def _shortfall(self, failed: "Failed", ranked: list[PlannedSetup]) -> Shortfall:
        candidate = failed.candidate
        return Shortfall(
            setup=failed.setup.resolve(self.model.context_length),
            limit_bytes=self.sizing.limit_bytes,
            given_up=candidate.given_up,
            tier=candidate.tier,
            find_estimate=failed.find_estimate,
            find_better=cache(partial(self._better, failed, ranked)),
        )

    def _better(self, failed: "Failed", ranked: list[PlannedSetup]) -> Estimate | None:
        """What fits and is nearest to what does not, with its micro-batch where that fits: the change that is then told."""
        for each in sorted(ranked, key=lambda each: distance(failed.candidate, each)):
            smaller = self.sizing.no_larger(each.estimate, failed.setup)
            if self.sizing.fits(smaller):
                return smaller
            settled = self._borne_out(each)
            if settled is not None:
                return settled.estimate
        return None


def _way(each: Candidate | PlannedSetup) -> tuple[object, ...]:
    """What two share that differ only in what they offload, or in checkpointing, on so many GPUs."""
    setup = each.setup
    engine, precision = setup.chosen_engine, setup.chosen_precision
    return (setup.num_gpus, engine, setup.zero_stage, each.given_up, precision, degrees_of(setup))


def _place(setups: list[PlannedSetup], wanted: PlannedSetup) -> int:
    return next(number for number, each in enumerate(setups) if each is wanted)
