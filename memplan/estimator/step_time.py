"""The time of a training step: the tape's operations and the engine's exchanges, laid beside each other.

Three cases are told: what is expected, and a low and a high end between which what no formula knows lies.
"""

from dataclasses import field
from typing import NamedTuple

from memplan.compute.flops import ScoreCount, StepFlops, count_flops
from memplan.compute.lanes import Clock, Interval, Lane, Stage
from memplan.compute.links import collective_seconds
from memplan.compute.rates import Rates, rates_of
from memplan.compute.roofline import SegmentWork, Work, segment_work
from memplan.errors import UnsupportedOperationError
from memplan.estimator.estimate import Estimate
from memplan.estimator.job import Job
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.network import Network, network_of
from memplan.memory.accounts import MICRO_BATCHES, step_visits
from memplan.memory.ledger import Part
from memplan.training.exchange import Exchange, ExchangeKind, Hiding, Ranks, Visit
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup


class Case(NamedTuple):
    """How far rates are from the expected ones."""

    compute: float
    """Time of what the GPU computes, over the expected."""
    links: float
    host: float
    interference: float
    """Of an exchange's time, by which computing beside it takes longer."""


EXPECTED = Case(1.0, 1.0, 1.0, 0.12)
"""NCCL takes 16 of an H100's 132 multiprocessors."""
FAST = Case(0.9, 0.85, 0.6, 0.0)
SLOW = Case(1.15, 1.4, 1.8, 0.2)
"""Cards differ by 10 % in clocks under load; links by how busy they are; hosts most of all."""


class Resource(NamedTuple):
    """What a step waits for, and for how long."""

    words: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """How long one optimizer step takes."""

    low_s: float
    expected_s: float
    high_s: float
    num_gpus: int
    tokens: int
    """Of all GPUs, in one step."""
    model_flops: int
    """Forward and backward of all of them, every score counted (PaLM's convention)."""
    executed_flops: int
    """With what is computed again."""
    peak_flops_per_s: float
    """Of one GPU, by the data sheet."""
    shares: tuple[Resource, ...]
    """What the expected step consists of, the longest first [s]."""
    intervals: tuple[Interval, ...] = field(repr=False, compare=False)
    """Its lanes: a first micro-batch of each kind, then the update."""
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.expected_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one of them."""
        return self.tokens_per_s / self.num_gpus

    @property
    def flops_per_s_per_gpu(self) -> float:
        """Model FLOPs: what papers call achieved."""
        return self.model_flops / (self.expected_s * self.num_gpus)

    @property
    def mfu(self) -> float:
        """Of the data sheet's dense rate in 16 bits, what the model's own FLOPs are."""
        return self.flops_per_s_per_gpu / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        """The same with recomputation."""
        return self.mfu * self.executed_flops / self.model_flops

    @property
    def binding(self) -> str:
        """What most of the step is spent on."""
        return self.shares[0].words

    def with_mfu(self, mfu: float) -> "StepTime":
        """The same at a utilisation that is known."""
        from dataclasses import replace

        seconds = self.model_flops / (mfu * self.peak_flops_per_s * self.num_gpus)
        note = f"the utilisation was given: {mfu:.0%}"
        return replace(
            self, low_s=seconds, expected_s=seconds, high_s=seconds, notes=(*self.notes, note)
        )


def step_time(answer: Estimate, *, between_nodes: float | None = None) -> StepTime:
    """How long a step of an estimated setup takes.

    ``between_nodes`` is a GPU's nominal share of the network between nodes [bytes/s]; None: what nodes
    of these cards are sold with. Raises ``UnsupportedOperationError`` for a model whose operations are
    not written down.
    """
    return time_of(Job.of(answer.model, answer.setup, answer.gpu), between_nodes=between_nodes)


def time_of(
    job: Job, *, between_nodes: float | None = None, rates: Rates | None = None
) -> StepTime:
    """The same of a job, on a GPU that reaches these rates; None: those of its kind."""
    rates = rates or rates_of(job.gpu)
    setup, model, tape = job.setup, job.walked.model, job.given.tape
    flops = _flops(job)
    network = network_of(job.gpu, gpus_per_node=setup.gpus_per_node, between_nodes=between_nodes)
    timer = _Timer(
        setup=setup,
        work=segment_work(tape, model, rates),
        visits=step_visits(job.given),
        network=network,
        rates=rates,
        job=job,
    )
    expected = timer.run(EXPECTED)
    copies = setup.gradient_accumulation_steps * setup.data_parallel
    return StepTime(
        low_s=timer.run(FAST).clock.now_s,
        expected_s=expected.clock.now_s,
        high_s=timer.run(SLOW).clock.now_s,
        num_gpus=setup.num_gpus,
        tokens=flops.num_tokens * copies,
        model_flops=flops.model * copies,
        executed_flops=flops.total * copies,
        peak_flops_per_s=_peak(job.gpu, setup),
        shares=expected.shares(),
        intervals=tuple(expected.clock.intervals),
    )


def _flops(job: Job) -> StepFlops:
    from memplan.estimator.flops import estimate_flops

    if job.setup.tensor_parallel == 1:
        counted = count_flops(job.given.tape, job.walked.model, scores=ScoreCount.FULL)
    else:
        counted = estimate_flops(job.walked.model, job.setup, job.gpu)
    if not counted.total:
        msg = (
            f"{job.walked.model.source}: its operations are not written down yet, only its parameters, "
            "so that the time of a step is not known"
        )
        raise UnsupportedOperationError(msg)
    return counted


def _peak(gpu: GpuSpec | None, setup: TrainingSetup) -> float:
    """The data sheet's dense rate in the format that is computed in, fp8 left out of account."""
    formats = PRECISIONS[setup.chosen_precision]
    half = (formats.autocast or formats.compute).is_half
    sheet = gpu.dense_tflops if gpu is not None else None
    if sheet is None:
        return 312e12
    found = (sheet.bf16 or sheet.fp16) if half else (sheet.tf32 or sheet.fp32)
    return (found or sheet.fp16 or sheet.fp32 or 312.0) * 1e12


class _Run:
    """One case, run through."""

    def __init__(self, case: Case) -> None:
        self.clock = Clock(interference=case.interference)
        self.sums: dict[str, float] = {}

    def add(self, words: str, seconds: float) -> None:
        if seconds > 0:
            self.sums[words] = self.sums.get(words, 0.0) + seconds

    def shares(self) -> tuple[Resource, ...]:
        clock = self.clock
        self.add("waiting for the host to launch kernels", clock.host_bound_s)
        self.add("communication that computing does not hide", clock.exposed_s[Lane.LINK])
        self.add("transfers to and from the host", clock.exposed_s[Lane.HOST])
        found = [Resource(words, seconds) for words, seconds in self.sums.items()]
        return tuple(sorted(found, key=lambda each: -each.seconds))


class _Timer:
    """A step's stages for any case."""

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        work: "tuple[SegmentWork, ...] | list[SegmentWork]",
        visits: tuple[Visit, ...],
        network: Network,
        rates: Rates,
        job: Job,
    ) -> None:
        self.setup = setup
        self.work = work
        self.network = network
        self.rates = rates
        self.job = job
        self.split = Ranks(setup.tensor_parallel)
        self.passes: dict[str, list[Visit]] = {}
        for visit in visits:
            self.passes.setdefault(visit.part, []).append(visit)

    def run(self, case: Case) -> _Run:
        run = _Run(case)
        steps = self.setup.gradient_accumulation_steps
        told = min(steps, MICRO_BATCHES)
        for number in range(told):
            before, waited = run.clock.now_s, dict(run.clock.exposed_s)
            bound, sums = run.clock.host_bound_s, dict(run.sums)
            self._micro_batch(run, case, number)
            if number == 1 and steps > told:
                # Those between the first and the last are alike.
                more = steps - told
                clock = run.clock
                clock.host_bound_s += more * (clock.host_bound_s - bound)
                for lane in Lane:
                    clock.exposed_s[lane] += more * (clock.exposed_s[lane] - waited[lane])
                for words, seconds in list(run.sums.items()):
                    run.sums[words] = seconds + more * (seconds - sums.get(words, 0.0))
                clock.now_s += more * (clock.now_s - before)
                clock.free_s = dict.fromkeys(Lane, clock.now_s)
        self._update(run, case)
        return run

    def _micro_batch(self, run: _Run, case: Case, number: int) -> None:
        tape, passes = self.job.given.tape, self.job.given.passes
        forward = self._told(Part.FORWARD, number)
        backward = self._told(Part.BACKWARD, number)
        stages = [
            self._stage(run, case, each.name, each.index, each.repeat, (self.work[each.index].forward,), forward)
            for each in tape.segments
        ]
        run.clock.run(stages)
        done: set[int] = set()
        stages = []
        for each in passes.backward:
            index = each.segment.index
            work = self.work[index]
            visit = backward if index not in done else None
            done.add(index)
            name = f"{each.segment.name} backward"
            stages.append(
                self._stage(run, case, name, index, each.repeats, (work.backward, work.again), visit)
            )
        beside = self._beside(run, case, backward)
        run.clock.run([*stages, *beside])

    def _told(self, part: Part, number: int) -> Visit | None:
        found = self.passes.get(part.value, ())
        return found[min(number, len(found) - 1)] if found else None

    def _beside(self, run: _Run, case: Case, visit: Visit | None) -> list[Stage]:
        """What is exchanged when all segments have run."""
        stage = self._stage(run, case, "reduction", -1, 1, (), visit)
        return [stage]

    def _stage(
        self,
        run: _Run,
        case: Case,
        words: str,
        index: int,
        repeats: int,
        works: tuple[Work, ...],
        visit: Visit | None,
    ) -> Stage:
        device = asked = sent = 0.0
        for work in works:
            device += work.products_s + work.attention_s + work.memory_s
            asked += work.host_s
            for message in work.messages:
                sent += collective_seconds(
                    message.kind, message.num_bytes, self.split, self.network
                )
            run.add("products of matrices", repeats * case.compute * work.products_s)
            run.add("attention", repeats * case.compute * work.attention_s)
            run.add("reading and writing the GPU's memory", repeats * case.compute * work.memory_s)
        sums: dict[tuple[bool, Hiding], float] = {}
        copies = 0.0
        for exchange, count in visit.exchanges if visit is not None else ():
            if exchange.segment != index:
                continue
            seconds = count * self.seconds(exchange)
            if exchange.kind in (ExchangeKind.COPY, ExchangeKind.UPDATE):
                copies += seconds
            else:
                key = exchange.kind in _TO_HOST, exchange.hiding
                sums[key] = sums.get(key, 0.0) + seconds
        run.add("the engine's copies", case.compute * copies)
        blocked = case.links * sums.get((False, Hiding.NONE), 0.0)
        blocked += case.host * sums.get((True, Hiding.NONE), 0.0)
        return Stage(
            words=words,
            repeats=repeats,
            compute_s=case.compute * (device + copies / repeats),
            host_s=asked * case.compute,
            blocking_s=blocked + repeats * case.links * sent,
            ahead_s=case.links * sums.get((False, Hiding.AHEAD), 0.0),
            behind_s=case.links * sums.get((False, Hiding.BEHIND), 0.0),
            fetched_s=case.host * sums.get((True, Hiding.AHEAD), 0.0),
            stored_s=case.host * sums.get((True, Hiding.BEHIND), 0.0),
        )

    def _update(self, run: _Run, case: Case) -> None:
        """The optimizer's step, and what goes with it."""
        clock = run.clock
        sums: dict[tuple[Lane, str], float] = {}
        for part in (Part.STEP, Part.OVERFLOW):
            for visit in self.passes.get(part.value, ()):
                for exchange, count in visit.exchanges:
                    lane, words, scale = _PLACES.get(exchange.kind, (Lane.LINK, "communication", 1))
                    seconds = count * self.seconds(exchange)
                    key = lane, words
                    factor = (case.compute, case.links, case.host)[scale]
                    sums[key] = sums.get(key, 0.0) + factor * seconds
        for (lane, words), seconds in sums.items():
            if lane is Lane.COMPUTE:
                run.add("the optimizer's step", seconds)
            clock.wait(lane, seconds, words)

    def seconds(self, exchange: Exchange) -> float:
        """One exchange by itself."""
        kind, network = exchange.kind, self.network
        if kind in (ExchangeKind.COPY, ExchangeKind.UPDATE):
            return exchange.num_bytes / self.rates.bytes_per_s
        if kind in _TO_HOST:
            return exchange.num_bytes / network.to_host
        if kind is ExchangeKind.HOST_UPDATE:
            return exchange.num_bytes * network.gpus_per_node / network.host_memory
        return collective_seconds(kind, exchange.num_bytes, exchange.ranks, network)


_TO_HOST = frozenset({ExchangeKind.TO_GPU, ExchangeKind.TO_HOST})
_PLACES = {
    ExchangeKind.COPY: (Lane.COMPUTE, "optimizer", 0),
    ExchangeKind.UPDATE: (Lane.COMPUTE, "optimizer", 0),
    ExchangeKind.TO_GPU: (Lane.HOST, "weights to the GPU", 2),
    ExchangeKind.TO_HOST: (Lane.HOST, "gradients to the host", 2),
    ExchangeKind.HOST_UPDATE: (Lane.HOST, "optimizer on the CPU", 2),
}
