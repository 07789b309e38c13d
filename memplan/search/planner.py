"""From a model, a GPU and a goal to the setups that fit, best first.

The space: numbers of GPUs x engine, stage and offload x precision x tensor-parallel degrees x
checkpointing, each with the largest micro-batch that fits. Offloading is tried where the same engine does not fit without it, and
less recomputation where more of it fits.
Parallel degrees that the goal does not name are those of its base setup.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from memplan.errors import SetupError
from memplan.estimator import Estimate, Verdict, estimate, least_bytes, settled
from memplan.fast_dataclass import dataclass
from memplan.graph.model import record_model
from memplan.graph.options import TapeOptions
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.batch import MAX_MICRO_BATCH, SizeSearch, fits_within, largest_of, surely_fits
from memplan.search.concessions import Concession, conceded, order_of
from memplan.search.depth import with_layers
from memplan.search.goal import EngineVariant, Goal, Objective, Plan, PlannedSetup, Shortfall
from memplan.search.grid import with_global_batch
from memplan.search.speed import ASSUMPTIONS, relative_speed
from memplan.training.kernels import KernelPreset
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import (
    PRECISIONS,
    Engine,
    Precision,
    engine_precision,
    engines_with,
)
from memplan.training.setup import Checkpointing, Recomputation, TrainingSetup

EQUAL_SPEED = 0.02
"""Setups whose speeds differ by less are equals, and the simplest of them comes first."""
SEQ_LEN_STEP = 128
"""Sequences are lengthened by so many tokens: kernels work on blocks of them."""
MAX_SEQ_LEN = 2**24
"""Beyond which nobody looks [tokens]."""
MAX_LAYERS = 1000
"""Beyond which nobody looks."""


def plan(model: ModelSpec, goal: Goal, gpu: GpuSpec) -> Plan:
    """Search for the setups that reach a goal on one kind of GPU.

    Raises ``SetupError`` where no combination of the goal's settings exists.
    """
    return Planner(model, goal, gpu).run()


@dataclass(slots=True)
class _Candidate:
    """One combination of the space, its micro-batch still open."""

    setup: TrainingSetup
    variant: EngineVariant
    given_up: Concession
    simplicity: int
    tier: int


class Planner:
    """Walks the space of one goal."""

    def __init__(self, model: ModelSpec, goal: Goal, gpu: GpuSpec) -> None:
        self.model = model
        self.goal = goal
        self.gpu = gpu
        self.limit_bytes = int(gpu.capacity_bytes * (1 - goal.headroom))
        self.active_params = active_parameters(model)
        self.found: list[PlannedSetup] = []
        self.failed: list[tuple[_Candidate, Estimate]] = []
        self.overfilling: list[Estimate] = []
        self.refused: dict[str, None] = {}
        self.at_hand: TrainingSetup | None = None
        self.answers: dict[int, Estimate] = {}
        """Estimates of the setup at hand, by micro-batch."""
        self.stretches = goal.objective in (Objective.SEQ_LEN, Objective.LAYERS)
        """What is looked for is no micro-batch: that is given, and offloading lengthens it."""
        self.largest: dict[object, int] = {}
        """The last size that fitted, by everything but the number of GPUs: where to look
        first when there are more."""

    def run(self) -> Plan:
        """Try everything, rank what fits, and say what the rest lacks."""
        for num_gpus in self.goal.num_gpus:
            fitting: set[tuple[object, ...]] = set()
            hopeless: set[tuple[object, ...]] = set()
            for candidate in self._candidates(num_gpus):
                key = _without_offload(candidate)
                if candidate.variant.offloads and key in fitting and not self.stretches:
                    continue
                setup = candidate.setup
                split = setup.tensor_parallel
                own = (candidate.variant, candidate.given_up, setup.precision, split)
                if own in hopeless:
                    continue
                if self._try(candidate):
                    fitting.add(key)
                else:
                    hopeless.add(own)
        if not (self.found or self.failed or self.overfilling):
            raise SetupError(next(iter(self.refused), "the goal leaves nothing to try"))
        ranked = sorted(self.found, key=self._rank)
        return Plan(
            goal=self.goal,
            gpu=self.gpu,
            setups=tuple(self._told(each) for each in ranked[: self.goal.limit]),
            num_fitting=len(ranked),
            shortfalls=tuple(self._shortfall(*each, ranked) for each in self.failed),
            overfilling=tuple(self.overfilling),
            refused=tuple(self.refused),
            assumptions=(*self.model.assumptions, *ASSUMPTIONS),
        )

    # -- the space -------------------------------------------------------------------------------

    def _candidates(self, num_gpus: int) -> Iterator[_Candidate]:
        for given_up in self.goal.concessions:
            try:
                base = conceded(self.goal.base, given_up)
            except SetupError as error:
                self.refused[str(error)] = None
                continue
            yield from self._candidates_of(base, given_up, num_gpus)

    def _candidates_of(
        self, base: TrainingSetup, given_up: Concession, num_gpus: int
    ) -> Iterator[_Candidate]:
        variants = self.goal.variants
        engines = tuple({each.engine for each in variants})
        policies = sorted(self._policies(), key=_saving, reverse=True)
        for simplicity, variant in enumerate(variants):
            if not _is_sensible(variant, num_gpus, engines):
                continue
            for tier, precision in self._precisions(base, variant.engine):
                for split, checkpointing in product(self.goal.split_as(base), policies):
                    if not _may_split(variant, split.tensor_parallel, num_gpus):
                        continue
                    try:
                        setup = replace(
                            base,
                            tensor_parallel=split.tensor_parallel,
                            sequence_parallel=split.sequence_parallel,
                            loss_parallel=split.loss_parallel,
                            num_gpus=num_gpus,
                            num_nodes=None,
                            engine=variant.engine,
                            zero_stage=variant.zero_stage,
                            fsdp_strategy=variant.fsdp_strategy,
                            offload_optimizer=variant.offload_optimizer,
                            offload_param=variant.offload_param,
                            precision=precision,
                            checkpointing=checkpointing,
                            engine_options=variant.options(base),
                        )
                    except SetupError as error:
                        self.refused[str(error)] = None
                        continue
                    yield _Candidate(setup, variant, given_up, simplicity, tier)

    def _precisions(self, base: TrainingSetup, engine: Engine) -> list[tuple[int, Precision]]:
        """The precisions to try with an engine, and the tier of each.

        An adapter's states are in its own format, whatever the frozen weights are in.
        """
        is_frozen = base.adapter is not None
        if self.goal.precisions:
            asked = [each for each in self.goal.precisions if engine in engines_with(each)]
            chosen = [engine_precision(each, engine) for each in asked]
        else:
            has_bf16 = self.gpu.has_bf16
            chosen = [engine_precision(None, engine, has_bf16=has_bf16, is_frozen=is_frozen)]
            if has_bf16 and not is_frozen and engine in PRECISIONS[Precision.BF16].engines:
                chosen.append(Precision.BF16)
        return [(0 if is_frozen else _tier(each), each) for each in chosen]

    def _policies(self) -> tuple[Checkpointing, ...]:
        if self.goal.checkpointing:
            return self.goal.checkpointing
        if self.goal.base.kernels is KernelPreset.HF:
            return (Recomputation.NONE, Recomputation.FULL)
        return (Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL)

    def _sizes(self, setup: TrainingSetup) -> list[int]:
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

    # -- one candidate ---------------------------------------------------------------------------

    def _try(self, candidate: _Candidate) -> bool:
        """Find the largest micro-batch of a candidate; whether there is one."""
        try:
            if self._overfills_node(self._estimate(candidate.setup, 1)):
                return False
            best = self._largest(candidate)
            if best is None:
                smallest = self._estimate(candidate.setup, 1)
                self.failed.append((candidate, smallest))
                return False
            answer = self._estimate(candidate.setup, best)
            if self._overfills_node(answer):
                return False
        except SetupError as error:
            self.refused[str(error)] = None
            return False
        speed = relative_speed(answer, active_params=self.active_params)
        self.found.append(
            PlannedSetup(
                estimate=answer,
                speed=speed,
                given_up=candidate.given_up,
                tier=candidate.tier,
                simplicity=candidate.simplicity,
            )
        )
        return True

    def _overfills_node(self, answer: Estimate) -> bool:
        """Whether a node's CPU RAM is not enough for it; then it is kept."""
        node = self.goal.node_memory_bytes
        if node is None or answer.host_bytes <= node:
            return False
        self.overfilling.append(replace(answer, node_memory_bytes=node))
        return True

    def _largest(self, candidate: _Candidate) -> int | None:
        setup = candidate.setup
        if self.goal.global_batch_size is not None and not self.stretches:
            sizes = self._sizes(setup)
            if self._size_fits(setup, sizes[-1]):
                # Without accumulation no whole gradients wait: it may fit where smaller ones do not.
                return sizes[-1]
            return largest_of(sizes, lambda size: self._size_fits(setup, size))
        key = (
            candidate.variant, candidate.given_up, candidate.tier, setup.precision,
            setup.checkpointing, setup.tensor_parallel,
        )  # fmt: skip
        search = SizeSearch(
            lambda size: self._known(self._estimate(setup, size)),
            self.limit_bytes,
            looks_beyond=self.stretches,
        )
        run = search.replayed if self.goal.exact else search.bounded
        best = run(first=self.largest.get(key, 1), limit=self._limit())
        self.largest[key] = max(best, 1)
        return best or None

    def _size_fits(self, setup: TrainingSetup, size: int) -> bool:
        """Whether a size fits, its activations alone being looked at first."""
        alone = least_bytes(self.model, self._sized(setup, size), self.gpu)
        return alone <= self.limit_bytes and self._fits(self._estimate(setup, size))

    def _estimate(self, setup: TrainingSetup, size: int) -> Estimate:
        """One estimate; those of the setup at hand are kept, as a search ends where it has been."""
        if setup is not self.at_hand:
            self.at_hand = setup
            self.answers = {}
        answer = self.answers.get(size)
        if answer is None:
            answer = self.answers[size] = self._ask(setup, size)
        return answer

    def _ask(self, setup: TrainingSetup, size: int) -> Estimate:
        """The estimate of one size of what the goal makes large."""
        if not self.stretches:
            return estimate(self.model, self._sized(setup, size), self.gpu)
        if self.goal.global_batch_size is not None:
            setup = with_global_batch(setup, self.goal.global_batch_size)
        if self.goal.objective is Objective.LAYERS:
            return estimate(with_layers(self.model, size), setup, self.gpu)
        return estimate(self.model, replace(setup, seq_len=size * SEQ_LEN_STEP), self.gpu)

    def _limit(self) -> int:
        """The largest size to look at."""
        if self.goal.objective is Objective.LAYERS:
            return MAX_LAYERS
        if self.goal.objective is Objective.SEQ_LEN:
            embedding = self.model.stacks[0].embedding if self.model.stacks else None
            positions = embedding.num_positions if embedding is not None else 0
            return (self.model.context_length if positions else MAX_SEQ_LEN) // SEQ_LEN_STEP
        return MAX_MICRO_BATCH

    def _sized(self, setup: TrainingSetup, size: int) -> TrainingSetup:
        steps = setup.gradient_accumulation_steps
        if self.goal.global_batch_size is not None:
            steps = self.goal.global_batch_size // (size * setup.data_parallel)
        return replace(setup, micro_batch_size=size, gradient_accumulation_steps=max(1, steps))

    def _known(self, answer: Estimate) -> Estimate:
        """The answer, of which it can be said whether it fits.

        Raises ``SetupError`` where the figure is a lower bound that would fit.
        """
        if answer.verdict is Verdict.STATES_FIT:
            msg = (
                f"{self.model.name}: left out of its figures are {', '.join(answer.unmodelled)}: "
                "no setup can be said to fit; memplan estimate and sweep give what is counted"
            )
            raise SetupError(msg)
        return answer

    def _fits(self, answer: Estimate) -> bool:
        fits = fits_within if self.goal.exact else surely_fits
        return fits(self._known(answer), self.limit_bytes)

    def _shown(self, answer: Estimate) -> Estimate:
        """As it is told: with what its run really needs, where runs are replayed."""
        return settled(answer, always=True) if self.goal.exact else answer

    def _told(self, each: PlannedSetup) -> PlannedSetup:
        shown = self._shown(each.estimate)
        node = self.goal.node_memory_bytes
        return replace(each, estimate=replace(shown, node_memory_bytes=node))

    # -- the order -------------------------------------------------------------------------------

    def _rank(self, each: PlannedSetup) -> tuple[float, ...]:
        lost = (order_of(each.given_up), each.tier)
        objective = self.goal.objective
        setup = each.setup
        batch = setup.micro_batch_size * setup.data_parallel
        simple = (each.simplicity, _recomputed(setup), -setup.micro_batch_size)
        if objective is Objective.GPUS:
            return (*lost, setup.num_gpus, _bucket(each.speed.per_gpu), *simple)
        if objective is Objective.BATCH:
            return (*lost, -batch, _bucket(each.total_speed), *simple)
        if objective is Objective.SEQ_LEN:
            return (*lost, -(setup.seq_len or 0), _bucket(each.total_speed), *simple)
        if objective is Objective.LAYERS:
            return (*lost, -each.estimate.model.num_layers, _bucket(each.total_speed), *simple)
        return (*lost, _bucket(each.total_speed), setup.num_gpus, *simple)

    def _shortfall(
        self, candidate: _Candidate, answer: Estimate, ranked: list[PlannedSetup]
    ) -> Shortfall:
        nearest = min(ranked, key=lambda each: _distance(candidate, each), default=None)
        better = None
        if nearest is not None:
            better = self._shown(self._no_larger(nearest.estimate, answer))
        shown = self._shown(answer)
        return Shortfall(
            estimate=shown,
            missing_bytes=max(0, shown.total_bytes.high - self.limit_bytes),
            given_up=candidate.given_up,
            tier=candidate.tier,
            better=better,
        )

    def _no_larger(self, fitting: Estimate, answer: Estimate) -> Estimate:
        """What fits, with the micro-batch of what does not: the change that is then told."""
        size = 1 if self.stretches else answer.setup.micro_batch_size
        if not self.stretches and fitting.setup.micro_batch_size <= size:
            return fitting
        smaller = self._ask(fitting.setup, size)
        return smaller if self._fits(smaller) else fitting


def _without_offload(candidate: _Candidate) -> tuple[object, ...]:
    """What two candidates share that differ only in what they offload, or in checkpointing."""
    variant, setup = candidate.variant, candidate.setup
    split = setup.tensor_parallel
    return (variant.engine, variant.zero_stage, candidate.given_up, setup.precision, split)


def _is_sensible(variant: EngineVariant, num_gpus: int, engines: tuple[Engine, ...]) -> bool:
    """One GPU has nothing to shard: there, only offloading is worth an engine."""
    if num_gpus > 1 or variant.engine is Engine.DDP or Engine.DDP not in engines:
        return True
    return variant.offloads


def _may_split(variant: EngineVariant, degree: int, num_gpus: int) -> bool:
    """Whether an engine splits layers: DDP alone only where the group is the whole job."""
    if degree == 1:
        return True
    whole = degree == num_gpus
    return variant.engine is (Engine.DDP if whole else Engine.FSDP)


def _tier(precision: Precision) -> int:
    return 0 if PRECISIONS[precision].optimizer_states.num_bytes >= 4 else 1


def _recomputed(setup: TrainingSetup) -> float:
    return _saving(setup.checkpointing)


def _saving(value: Checkpointing) -> float:
    """A policy's place among policies: what recomputes more saves more."""
    if isinstance(value, float):
        return value
    if isinstance(value, CheckpointedLayers):
        return 0.5
    return {Recomputation.NONE: 0.0, Recomputation.SELECTIVE: 0.5, Recomputation.FULL: 1.0}[value]


def _bucket(speed: float) -> float:
    """Speeds as steps of ``EQUAL_SPEED``, fastest first."""
    from math import floor, log

    return -floor(log(speed) / log(1 + EQUAL_SPEED))


def _distance(candidate: _Candidate, fitting: PlannedSetup) -> tuple[float, ...]:
    """How far a setup that fits is from one that does not; the fewest and cheapest changes first."""
    one, other = candidate.setup, fitting.setup
    changes = (
        1.0 * (one.checkpointing != other.checkpointing)
        + 2.0 * (one.chosen_engine is not other.chosen_engine)
        + 1.0 * (one.zero_stage is not other.zero_stage)
        + 1.0 * (one.fsdp_strategy is not other.fsdp_strategy)
        + 2.0 * (one.offload_optimizer is not other.offload_optimizer)
        + 2.0 * (one.offload_param is not other.offload_param)
        + 3.0 * (candidate.tier != fitting.tier)
        + 3.0 * abs(order_of(candidate.given_up) - order_of(fitting.given_up))
        + 2.0 * (one.tensor_parallel != other.tensor_parallel)
        + 4.0 * (one.num_gpus != other.num_gpus)
    )
    return (changes, other.num_gpus, fitting.simplicity)


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token passes: all of a dense model, a share of a mixture's experts."""
    tape = record_model(model, TapeOptions())
    return sum(
        parameter.active_numel * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
    )
