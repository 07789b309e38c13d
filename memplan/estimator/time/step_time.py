"""The time of a training step: the tape's operations and the engine's exchanges, laid beside each other.

Three cases are told: what is expected, and a low and a high end between which what no formula knows lies.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import hypot, sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memplan.compute.congestion import crowded_factor
from memplan.compute.flops import ScoreCount, StepFlops, count_flops
from memplan.compute.host import HostSpeed
from memplan.compute.lanes import Interval
from memplan.compute.rates import DEFAULT_TFLOPS, Rates, is_compared, rates_of
from memplan.compute.roofline import segment_work
from memplan.compute.side_pass import GENERATION, NO_SIDE_PASSES
from memplan.compute.slowest import slowest_factor
from memplan.errors import InputError, UnsupportedOperationError
from memplan.estimator.flops import estimate_flops
from memplan.estimator.job import Job
from memplan.estimator.recording import Walked, completion_length
from memplan.estimator.time.calibration import (
    CODE_HIGH,
    CODE_LOW,
    MEASURED_HIGH,
    MEASURED_LOW,
    OWN_HIGH,
    OWN_LOW,
    Calibration,
    Part,
    bends,
    solved,
    spread_of,
)
from memplan.estimator.time.site import USUAL_SITE, Site
from memplan.estimator.time.timer import (
    BUSY_LINKS,
    COMPUTE,
    LAUNCHES,
    LINKS,
    UNMEASURED_COMPUTE,
    UNNAMED_LINKS,
    Case,
    Cases,
    Ends,
    Resource,
    Run,
    Timer,
    cases_of,
)
from memplan.estimator.time.timer import HOST as OFFLOAD
from memplan.fast_dataclass import dataclass, field, replace
from memplan.graph.remembered import OF_TAPES
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.network import network_of
from memplan.memory.accounts import step_visits
from memplan.training.activation_offload import ActivationOffload
from memplan.training.precision import PRECISIONS
from memplan.training.setup import TrainingSetup

if TYPE_CHECKING:
    from memplan.estimator.time.pipeline_timer import PipelineTimer
    from memplan.model.spec import ModelSpec


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
    path: tuple[Interval, ...] = field(default=(), repr=False, compare=False)
    """What the drawn step waits for, stretch by stretch: they follow one another without gaps."""
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
        seconds = self.model_flops / (mfu * self.peak_flops_per_s * self.num_gpus)
        note = f"the utilisation was given: {mfu:.0%}"
        return replace(
            self, low_s=seconds, expected_s=seconds, high_s=seconds, notes=(*self.notes, note)
        )


class Judged(Protocol):
    """An estimate, as far as its time goes."""

    @property
    def model(self) -> "ModelSpec":
        """What is trained."""

    @property
    def setup(self) -> TrainingSetup:
        """How."""

    @property
    def gpu(self) -> GpuSpec | None:
        """On what."""


def step_time(answer: Judged, *, site: Site = USUAL_SITE) -> StepTime:
    """How long a step of an estimated setup takes, on machines of some kind. Raises ``UnsupportedOperationError`` for a model whose operations are
    not written down.
    """
    return _remembered(_Asked(answer.model, answer.setup, answer.gpu, site))


class _Asked(NamedTuple):
    """An answer whose time is asked for, the same where it is that very one."""

    model: "ModelSpec"
    setup: TrainingSetup
    gpu: GpuSpec | None
    site: Site

    def __hash__(self) -> int:
        return id(self.setup)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Asked)
            and other.setup is self.setup
            and other.model is self.model
            and other.gpu is self.gpu
            and other.site == self.site
        )


@lru_cache(maxsize=128)
def _remembered(asked: _Asked) -> StepTime:
    """A plan ranks by times, then tells them, and draws them."""
    return time_of(Job.of_answer(asked.model, asked.setup, asked.gpu), site=asked.site)


def time_of(job: Job, *, site: Site = USUAL_SITE, rates: Rates | None = None) -> StepTime:
    """The same of a job, on a GPU that reaches these rates; None: those of its kind."""
    setup, gpu = job.setup, job.gpu
    if site.calibration is not None:
        _refuse_another_card(site.calibration, gpu)
    flops = _flops(job)
    timer = _timer_of(job, site, rates or rates_of(gpu))
    cases = cases_for(job, site)
    least_s = _loaded_s(setup, site)
    low, expected, high = (timer.run(each) for each in cases)
    for run in (low, expected, high):
        run.wait_for_data(least_s)
    copies = setup.gradient_accumulation_steps * setup.data_parallel
    found = StepTime(
        low_s=low.clock.now_s,
        expected_s=expected.clock.now_s,
        high_s=high.clock.now_s,
        num_gpus=setup.num_gpus,
        tokens=flops.num_tokens * copies,
        model_flops=flops.model * copies,
        executed_flops=flops.total * copies,
        peak_flops_per_s=_peak(gpu, setup),
        shares=expected.shares(),
        intervals=tuple(expected.clock.intervals),
        path=tuple(expected.clock.path),
        notes=tuple(_widened(job, site, high)),
    )
    return found if found.mfu <= 1 else replace(found, notes=(*found.notes, ABOVE_ONE))


def forward_seconds(job: Job, *, site: Site = USUAL_SITE) -> float:
    """One micro-batch forward alone, through the busiest stage of a pipeline [s]."""
    timer = _timer_of(job, site, rates_of(job.gpu))
    return timer.forward_alone_s(cases_for(job, site).expected)


def calibrated(
    job: Job, measured_s: float, *, site: Site = USUAL_SITE, rates: Rates | None = None
) -> Calibration:
    """What a measured step of a job says of its machines [s].

    Each part is slower or faster by its share of the step and by how little is known of it, and the job by itself (``bends``). Raises ``InputError`` where
    that is more than any machine is: another setup ran.
    """
    timer = _timer_of(job, site, rates or rates_of(job.gpu))
    cases = cases_for(job, replace(site, calibration=None))
    run = timer.run(cases.expected)
    exponents = bends(_shares_by_part(run), _spreads(cases))

    def stretched(factor: float) -> Case:
        case = cases.expected
        for part, exponent in exponents.parts.items():
            case = _stretched(case, part, factor ** (exponent + exponents.code + exponents.own))
        return case

    factor = solved(lambda factor: timer.run(stretched(factor)).clock.now_s, measured_s)
    if factor is None:
        msg = (
            f"measured step: {measured_s:g} s was said to be {run.clock.now_s:.3g} s, and no machine of this kind is so "
            "much slower or faster: see whether the setup is the one that ran"
        )
        raise InputError(msg)
    factors = {part: factor**exponent for part, exponent in exponents.parts.items()}
    if factors[Part.HOST] != 1.0:
        factors[Part.HOST] *= (
            site.host_factors.expected
        )  # of the usual one, whatever this one was said to be
    return Calibration(
        gpu=job.gpu.gpu_id if job.gpu is not None else "",
        setup=job.fingerprint,
        own=factor**exponents.own,
        code=job.code,
        of_code=factor**exponents.code,
        between_nodes=site.between_nodes,
        **{part.value: each for part, each in factors.items()},
    )


def _loaded_s(setup: TrainingSetup, site: Site) -> float:
    """What a node's loaders take to make its share of a step's sequences ready, beside whatever runs [s]."""
    if site.loaded_per_s is None:
        return 0.0
    sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
    return sequences / setup.nodes / site.loaded_per_s


_PARTS = {LAUNCHES: Part.HOST, LINKS: Part.LINKS, OFFLOAD: Part.OFFLOAD}


def _shares_by_part(run: Run) -> Mapping[Part, float]:
    """What of a step each part takes."""
    spent = dict.fromkeys(Part, 0.0)
    for each in run.shares():
        spent[_PARTS.get(each.words, Part.COMPUTE)] += each.seconds / run.clock.now_s
    return spent


def _spreads(cases: Cases) -> Mapping[Part, float]:
    """Standard deviation of the logarithm of what each part takes, by its range."""
    return {part: spread_of(_taken(cases.low, part), _taken(cases.high, part)) for part in Part}


def _timer_of(job: Job, site: Site, rates: Rates) -> "Timer | PipelineTimer":
    setup, model = job.setup, job.walked.model
    network = network_of(
        job.gpu,
        gpus_per_node=setup.gpus_per_node,
        between_nodes=site.named_network,
        oversubscription=site.oversubscription,
        sums_between=site.in_network_reduction,
        is_pinned=_pins(setup),
    )
    if setup.pipeline_parallel > 1:
        from memplan.estimator.time.pipeline_timer import (
            PipelineTimer as ForPipelines,  # only for them
        )

        return ForPipelines(job.given, model, network=network, rates=rates)
    work = segment_work(job.given.tape, model, rates)
    beside = NO_SIDE_PASSES
    if job.given.beside.models:
        from memplan.estimator.time.side_passes import side_passes  # only for jobs beside sft

        beside = side_passes(job, network, rates)
    return Timer(
        job.given, work, step_visits(job.given), network=network, rates=rates, beside=beside
    )


def cases_for(job: Job, site: Site) -> Cases:
    """What is expected of a job there, and its range; a measured step leaves little of that."""
    usual = cases_of(
        site.host_factors,
        compute=COMPUTE if is_compared(job.gpu) else UNMEASURED_COMPUTE,
        links=_links_of(job, site),
        slowest=slowest_factor(job.setup.num_gpus),
    )
    return usual if site.calibration is None else _measured_cases(usual, site.calibration, job)


def _measured_cases(usual: Cases, calibration: Calibration, job: Job) -> Cases:
    """With the factors of a measurement: what it said nothing of stays as little known as it was.

    Another setup than the measured one is off by its own, and by as much that the measured one's may have been taken for its machine's;
    where it runs other code, by what that differs by too; where a node was timed, by its own alone.
    """
    is_measured = calibration.setup == job.fingerprint
    runs_it = calibration.code == job.code
    told = _told_ends(calibration, is_measured=is_measured, runs_it=runs_it)
    expected = usual.expected
    own = calibration.own if is_measured else 1.0
    if runs_it:
        own *= calibration.of_code
    for part in Part:
        expected = _stretched(expected, part, own * calibration.factor(part))
    low, high = (expected._replace(is_expected=False),) * 2
    for part in Part:
        if not is_measured and calibration.factor(part) == 1.0:
            said = _taken(usual.expected, part)
            ends = Ends(_taken(usual.low, part) / said, _taken(usual.high, part) / said)
        else:
            ends = told
        low, high = _stretched(low, part, ends.low), _stretched(high, part, ends.high)
    return Cases(low, expected, high)


def _told_ends(calibration: Calibration, *, is_measured: bool, runs_it: bool) -> Ends:
    """How far a part is from what a measurement says of it; ``runs_it``: the code that was measured."""
    if is_measured:
        return Ends(MEASURED_LOW, MEASURED_HIGH)
    width = sqrt(2) if calibration.setup else 1.0
    own = Ends(OWN_LOW**width, OWN_HIGH**width)
    if runs_it or not calibration.setup:
        return own
    spreads = spread_of(*own), sqrt(2) * spread_of(CODE_LOW, CODE_HIGH)
    wider = hypot(*spreads) / spreads[0]
    return Ends(own.low**wider, own.high**wider)


def _links_of(job: Job, site: Site) -> Ends:
    if _has_unnamed_network(job, site):
        return UNNAMED_LINKS
    return BUSY_LINKS._replace(high=crowded_factor(job.setup.nodes))


_FIELDS = {
    Part.COMPUTE: "compute", Part.LINKS: "links", Part.HOST: "asked", Part.OFFLOAD: "host",
}  # fmt: skip
"""Of a ``Case``."""


def _taken(case: Case, part: Part) -> float:
    found: float = getattr(case, _FIELDS[part])
    return found


def _stretched(case: Case, part: Part, factor: float) -> Case:
    changed = {_FIELDS[part]: factor * _taken(case, part)}
    return case._replace(is_expected=case.is_expected, **changed)


def _refuse_another_card(calibration: Calibration, gpu: GpuSpec | None) -> None:
    name = gpu.gpu_id if gpu is not None else "no card"
    if name != calibration.gpu:
        msg = (
            f"calibration: was measured on {calibration.gpu}, and says nothing of {name}: ask for that card "
            "alone, or leave it out"
        )
        raise InputError(msg)


LEAST_WAITED = 0.05
"""Of the high end, what a wait has to be that its cause is named."""
MOST_COMPARED_GPUS = 2048
"""Beyond which no published step was compared (``tests/data/published_throughput.jsonl``, ``throughput.jsonl``)."""


def _widened(job: Job, site: Site, high: Run) -> Iterator[str]:
    """What nobody said, where it makes the range wide."""
    if site.calibration is not None:
        yield f"scaled by a step that was measured: {site.calibration.words}"
        return
    waited = {each.words: each.seconds / high.clock.now_s for each in high.shares()}
    if site.host is HostSpeed.USUAL and waited.get(LAUNCHES, 0.0) >= LEAST_WAITED:
        yield "the high end is on a slow host: nothing says which one it is (host)"
    if _has_unnamed_network(job, site) and waited.get(LINKS, 0.0) >= LEAST_WAITED:
        yield "the high end is on a quarter of the usual network: nothing says which one it is (network)"
    if not is_compared(job.gpu):
        yield "no step on this card was ever compared with what is said of it: the range is wider"
    if GENERATION in waited:
        tokens = completion_length(job.setup)
        yield f"completions are {tokens:,} tokens each; no step that generates was ever compared"
    if job.setup.num_gpus > MOST_COMPARED_GPUS:
        yield f"no step on more than {MOST_COMPARED_GPUS:,} GPUs was ever compared with what is said of it"


def _has_unnamed_network(job: Job, site: Site) -> bool:
    """Whether ranks are of several nodes that no switch of their own joins, and nobody said what does."""
    link = job.gpu.link if job.gpu is not None else None
    joined = max(job.setup.gpus_per_node, link.num_joined if link is not None else 0)
    return job.setup.num_gpus > joined and site.named_network is None


_PINNING = ("pin_memory", "offload_optimizer.pin_memory", "offload_param.pin_memory")


def _pins(setup: TrainingSetup) -> bool:
    """Whether what is offloaded lies in pinned memory, as it does unless the engine is told otherwise."""
    return all(
        value is not False for name, value in dict(setup.engine_options).items() if name in _PINNING
    )


ABOVE_ONE = (
    "MFU above 100 %: it counts every score, of which a causal kernel computes half, over the data sheet's "
    "rate in 16 bits"
)


def _flops(job: Job) -> StepFlops:
    """Of one micro-batch through one copy of the model."""
    setup = job.setup
    if setup.tensor_parallel == setup.context_parallel == setup.expert_parallel == 1:
        counted = _counted(job.walked)
    else:
        counted = _counted_whole(job)
    if not counted.total:
        msg = (
            f"{job.walked.model.source}: its operations are not written down yet, only its parameters, "
            "so the time of a step is not known"
        )
        raise UnsupportedOperationError(msg)
    return counted


_WHOLE: OrderedDict[Walked, StepFlops] = OrderedDict()
"""Of split models, as they are whole."""
OF_TAPES.forget_with(_WHOLE.clear)
REMEMBERED = 64


def _counted_whole(job: Job) -> StepFlops:
    """Of a model that is split, as it is whole; remembered by a rank's own."""
    found = _WHOLE.get(job.walked)
    if found is None:
        setup = replace(
            job.setup, pipeline_parallel=1, pipeline_schedule=None, virtual_stages=1,
            layers_per_stage=None, offload_activations=ActivationOffload.NONE,
            offload_activations_ratio=1.0,
        )  # fmt: skip
        found = _WHOLE[job.walked] = estimate_flops(job.walked.model, setup, job.gpu)
        if len(_WHOLE) > REMEMBERED:
            _WHOLE.popitem(last=False)
    return found


@OF_TAPES.remembered(maxsize=256)
def _counted(walked: Walked) -> StepFlops:
    return count_flops(walked.tape, walked.model, scores=ScoreCount.FULL)


def _peak(gpu: GpuSpec | None, setup: TrainingSetup) -> float:
    """The data sheet's dense rate in the format that is computed in, fp8 left out of account."""
    formats = PRECISIONS[setup.chosen_precision]
    half = (formats.autocast or formats.compute).is_half
    sheet = gpu.dense_tflops if gpu is not None else None
    if sheet is None:
        return DEFAULT_TFLOPS * 1e12
    found = (sheet.bf16 or sheet.fp16) if half else (sheet.tf32 or sheet.fp32)
    return (found or sheet.fp16 or sheet.fp32 or DEFAULT_TFLOPS) * 1e12
