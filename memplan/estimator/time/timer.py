"""A step's stages, for any case: the tape's operations with what the engine exchanges between them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

from memplan.compute.congestion import QUIET
from memplan.compute.host import HostFactors, engine_prices, step_price
from memplan.compute.lanes import Clock, Lane, Stage
from memplan.compute.links import collective_seconds
from memplan.compute.rates import Rates
from memplan.compute.side_pass import NO_SIDE_PASSES, SidePass, SidePasses
from memplan.compute.work import SegmentWork, Work
from memplan.estimator.time.exchanged import (
    NOTHING,
    Beside,
    Exchanging,
    beside_segments,
    exchanged_apart,
)
from memplan.hardware.network import Network
from memplan.memory.likeness import MICRO_BATCHES
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Part
from memplan.training.activation_offload import OFFLOAD_RULES
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.exchange import Group, Hiding, Ranks, Visit

PRODUCTS = "products of matrices"
ATTENTION = "attention"
MEMORY = "reading and writing the GPU's memory"
ENGINE_COPIES = "the engine's copies"
OPTIMIZER = "the optimizer's step"
INTERFERENCE = "computing slower beside communication"
LAUNCHES = "waiting for the host to launch kernels"
LINKS = "communication that computing does not hide"
HOST = "transfers to and from the host, and its optimizer"
DATA = "waiting for the data's loaders"


class Case(NamedTuple):
    """How far times are from the expected ones, as factors."""

    compute: float
    links: float
    host: float
    interference: float
    """Of an exchange's time, by which computing beside it takes longer."""
    asked: float
    """How many times as long as the CPU of the prices the host takes to ask for kernels."""
    is_expected: bool = False
    shorter: float = 1.0
    """Of the longest completion, how long those are that are generated."""


class Cases(NamedTuple):
    """What is expected, and what lies around it."""

    low: Case
    expected: Case
    high: Case


class Ends(NamedTuple):
    """Both ends of a range, as factors of a time."""

    low: float
    high: float


COMPUTE = Ends(0.9, 1.15)
"""Cards of one kind differ by 10 % in clocks under load, and code bases in the kernels that nobody named."""
UNMEASURED_COMPUTE = Ends(0.85, 1.4)
"""Of a card of which no product was measured: of 28 published steps on such cards the half that figures may be
taken from is off by -33 to +37 %."""
BUSY_LINKS = Ends(0.85, QUIET)
"""Links by how busy they are; of many nodes ``crowded_factor`` has the high end."""
UNNAMED_LINKS = Ends(0.85, 4.0)
"""Between nodes whose network nobody named: an A100's node has 1,600 Gbit/s or 400 (memplan/hardware/network.py, [1])."""
CPU_WORK = Ends(0.4, 2.5)
"""CPUs step an optimizer at 4 billion parameters in a second at best (arXiv:2101.06840, table 4, where cores are bound and
nothing else is counted), and at the usual half (``HOST_MEMORY_BYTES_PER_S``)."""
SHORTER = 0.5
"""Of the longest completion, how long those are that are generated, at the low end: an assumption."""
BESIDE_NCCL = 0.12
"""NCCL takes 16 of an H100's 132 multiprocessors while it runs."""


def cases_of(
    host: HostFactors, *, compute: Ends = COMPUTE, links: Ends = BUSY_LINKS, slowest: float = 1.0
) -> Cases:
    """What is expected, and what lies around it for want of knowing better; ``slowest``: by how much the slowest of the GPUs computes
    longer than one of its kind."""
    return Cases(
        Case(slowest * compute.low, links.low, CPU_WORK.low, 0.0, host.low, shorter=SHORTER),
        Case(slowest, 1.0, 1.0, BESIDE_NCCL, host.expected, is_expected=True),
        Case(slowest * compute.high, links.high, CPU_WORK.high, 0.2, host.high),
    )


class Resource(NamedTuple):
    """What a step waits for, and for how long."""

    words: str
    seconds: float


FORWARD, BACKWARD, AGAIN = range(3)
"""Which of a segment's passes is meant."""

Told: TypeAlias = tuple[str, int, tuple[tuple[int, int], ...], Beside]
"""A stage: its name, how often it runs, what it computes (segment and which work), what is beside it."""


class Laid(NamedTuple):
    """A segment of a pass, with what is exchanged beside it; times are expected ones [s]."""

    words: str
    repeats: int
    device_s: float
    """Of one repetition; as the next one."""
    asked_s: float
    sent_s: float
    """Between the ranks of a split model, all repetitions together."""
    beside: Beside


class Passed(NamedTuple):
    """A pass laid out."""

    stages: tuple[Laid, ...]
    sums: tuple[tuple[str, float], ...]
    """What its computing is spent on."""
    exchanges: bool


class Run:
    """One case, run through."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # What is drawn is the step as it is expected.
        self.clock = Clock(interference=case.interference, draws=case.is_expected)
        self.sums: dict[str, float] = {}
        self.last_backward_s = 0.0
        """What the last backward pass took."""

    def add(self, words: str, seconds: float) -> None:
        """Count it with what a step consists of."""
        if seconds > 0:
            self.sums[words] = self.sums.get(words, 0.0) + seconds

    def shares(self) -> tuple[Resource, ...]:
        """What the step consists of, the longest first: all that the longest path goes through, so that they add up to it."""
        clock = self.clock
        waits = {
            INTERFERENCE: clock.slowed_s, LAUNCHES: clock.host_bound_s, LINKS: clock.exposed_s[Lane.LINK],
            HOST: clock.exposed_s[Lane.HOST],
        }  # fmt: skip
        found = [Resource(*each) for each in (*self.sums.items(), *waits.items()) if each[1] > 0]
        return tuple(sorted(found, key=lambda each: -each.seconds))

    def pass_over(self, each: Passed) -> None:
        """One pass."""
        case, clock = self.case, self.clock
        for words, seconds in each.sums:
            self.add(words, case.compute * seconds)
        if not each.exchanges:
            clock.compute(
                _unhindered(each.stages, case), each.stages[0].words if each.stages else ""
            )
            return
        clock.run([_stage(stage, case) for stage in each.stages])

    def wait_for_data(self, least_s: float) -> None:
        """A step is no shorter than its loaders take: they work ahead, so that what they are late lies before the next step."""
        late = least_s - self.clock.now_s
        if late > 0:
            self.add(DATA, late)
            self.clock.idle(late, DATA)

    def side_pass(self, each: SidePass) -> None:
        """What runs beside the trained model's own passes, and before them."""
        case, clock = self.case, self.clock
        shorter = case.shorter if each.is_shorter else 1.0
        device, asked = case.compute * each.device_s * shorter, case.asked * each.asked_s * shorter
        self.add(each.words, device)
        stage = Stage(each.words, 1, device, asked, ahead_s=case.links * each.ahead_s)
        clock.run([stage])
        clock.wait(Lane.LINK, case.links * each.sent_s * shorter, each.words)
        clock.wait(Lane.HOST, case.host * each.host_s, each.words)

    def repeat(self, more: int, before: "Mark") -> None:
        """So many more of what has run since a mark."""
        clock = self.clock
        clock.host_bound_s += more * (clock.host_bound_s - before.bound_s)
        clock.slowed_s += more * (clock.slowed_s - before.slowed_s)
        for lane, seconds in before.exposed_s.items():
            clock.exposed_s[lane] += more * (clock.exposed_s[lane] - seconds)
        for words, seconds in list(self.sums.items()):
            self.sums[words] = seconds + more * (seconds - before.sums.get(words, 0.0))
        clock.skip(more * (clock.now_s - before.now_s))

    def mark(self) -> "Mark":
        """Where it stands."""
        clock = self.clock
        return Mark(
            clock.now_s, clock.host_bound_s, clock.slowed_s, dict(clock.exposed_s), dict(self.sums)
        )


class Mark(NamedTuple):
    """Where a run stands."""

    now_s: float
    bound_s: float
    slowed_s: float
    exposed_s: Mapping[Lane, float]
    sums: Mapping[str, float]


def _unhindered(stages: Sequence[Laid], case: Case) -> list[tuple[float, float]]:
    """What each stage of a pass in which nothing is exchanged takes the GPU and the host [s]."""
    return [
        (
            case.compute * (each.repeats * each.device_s + each.beside.copied_s),
            case.asked * each.repeats * each.asked_s,
        )
        for each in stages
    ]


def _stage(each: Laid, case: Case) -> Stage:
    words, repeats, device_s, asked_s, sent_s, beside = each
    copied_s, blocking_s, ahead_s, behind_s, fetched_s, stored_s, waited_s = beside
    compute, links, host = case.compute, case.links, case.host
    return Stage(
        words,
        repeats,
        compute * (device_s + copied_s / repeats),
        case.asked * asked_s,
        links * (blocking_s + sent_s),
        links * ahead_s,
        links * behind_s,
        host * fetched_s,
        host * stored_s,
        host * waited_s,
    )


class Timer:
    """A step on one rank."""

    def __init__(
        self,
        given: RankInput,
        work: Sequence[SegmentWork],
        visits: Sequence[Visit],
        *,
        network: Network,
        rates: Rates,
        beside: SidePasses = NO_SIDE_PASSES,
    ) -> None:
        setup = given.setup
        self.given = given
        self.beside = beside
        self.work = work
        self.network = network
        self.rates = rates
        self.engine = engine_prices(setup)
        num_trained = sum(
            each.repeat * told.num_trained
            for each, told in zip(given.tape.segments, work, strict=True)
        )
        self.waits_each_time = reads_each_loss(setup)
        self.step_asked_s = step_price(setup) * num_trained
        self.updates: list[Exchanging] = []
        forward: list[Visit] = []
        backward: list[Visit] = []
        for visit in visits:
            if visit.part == Part.FORWARD:
                forward.append(visit)
            elif visit.part == Part.BACKWARD:
                backward.append(visit)
            elif visit.part in (Part.STEP, Part.OVERFLOW):
                self.updates += exchanged_apart(visit, network, rates)
        self.micro_batches = _counted(forward, backward, setup.gradient_accumulation_steps)

    @cached_property
    def groups(self) -> Mapping[Group, Ranks]:
        """Who sends to whom among the ranks of one copy of the model."""
        setup, layers = self.given.setup, self.given.tape.options.megatron
        expert_degree = setup.tensor_parallel
        if layers is not None:
            expert_degree = layers.expert_ranks(setup.tensor_parallel)
        return {
            Group.SPLIT: Ranks(setup.tensor_parallel),
            Group.SHARED: Ranks(setup.context_parallel, setup.tensor_parallel),
            Group.EXPERT: Ranks(expert_degree),
            Group.SPREAD: Ranks(setup.expert_parallel, expert_degree),
        }

    def run(self, case: Case) -> Run:
        """Every micro-batch, then the update."""
        run = Run(case)
        for side in self.beside.of_step:
            run.side_pass(side)
        if self.beside.of_step:
            run.clock.synchronize()
        for forward, backward, count in self._laid:
            before = run.mark() if count > 1 else None
            for side in self.beside.of_micro_batch:
                run.side_pass(side)
            run.pass_over(forward)
            start_s = run.clock.now_s
            run.pass_over(backward)
            run.last_backward_s = run.clock.now_s - start_s
            if self.waits_each_time:
                run.clock.synchronize()
            if before is not None:
                run.repeat(count - 1, before)
        self.update(run)
        return run

    def forward_alone_s(self, case: Case) -> float:
        """A micro-batch forward, and nothing behind it [s]."""
        run = Run(case._replace(is_expected=False))
        for side in self.beside.of_micro_batch:
            run.side_pass(side)
        run.pass_over(self.forward(self.micro_batches[0][0]))
        run.clock.wait_for_launches(LAUNCHES)
        return run.clock.now_s

    @cached_property
    def _laid(self) -> list[tuple[Passed, Passed, int]]:
        return [
            (self.forward(ahead), self.backward(back), count)
            for ahead, back, count in self.micro_batches
        ]

    def forward(self, visit: Visit | None) -> Passed:
        """A forward pass with what is exchanged in it."""
        told = self._beside(visit)
        stages: list[Told] = [
            (each.name, each.repeat, ((each.index, FORWARD),), told.get(each.index, NOTHING))
            for each in self.given.tape.segments
        ]
        if -1 in told:
            stages.append(("", 1, (), told[-1]))
        return self._lay(stages)

    def backward(self, visit: Visit | None) -> Passed:
        """A backward pass with what is exchanged in it."""
        told = dict(self._beside(visit))
        stages: list[Told] = []
        for each in self.given.passes.backward:
            index = each.segment.index
            beside = told.pop(index, NOTHING)
            name = f"{each.segment.name}, backward"
            runs_again = self.work[index].again.host_s > 0
            passes = ((index, BACKWARD), (index, AGAIN)) if runs_again else ((index, BACKWARD),)
            stages.append((name, each.repeats, passes, beside))
        if told:
            stages.append(("reduction", 1, (), told.pop(-1, NOTHING)))
        return self._lay(stages)

    def _beside(self, visit: Visit | None) -> Mapping[int, Beside]:
        if visit is None:
            return {}
        return beside_segments(visit, self.network, self.rates)

    def _lay(self, stages: Sequence[Told]) -> Passed:
        laid: list[Laid] = []
        products = attention = memory = copies = 0.0
        exchanges = False
        for words, repeats, works, beside in stages:
            device = asked = own_sent = 0.0
            for index, place in works:
                work = self._work(index, place)
                device += work.device_s
                asked += self.asked_s(index, place)
                products += repeats * work.products_s
                attention += repeats * work.attention_s
                memory += repeats * work.memory_s
                if work.messages:
                    own_sent += repeats * self._sent(work)
                if work.away_bytes:
                    beside = self._with_away(beside, repeats * work.away_bytes, place)
            copies += beside.copied_s
            exchanges = exchanges or own_sent > 0 or any(beside[1:])
            laid.append(Laid(words, repeats, device, asked, own_sent, beside))
        sums = (
            (PRODUCTS, products), (ATTENTION, attention), (MEMORY, memory), (ENGINE_COPIES, copies),
        )  # fmt: skip
        return Passed(tuple(laid), sums, exchanges)

    def _work(self, index: int, place: int) -> Work:
        segment = self.work[index]
        return (segment.forward, segment.backward, segment.again)[place]

    def asked_s(self, index: int, place: int) -> float:
        """What one pass over a segment takes the host, one repetition of it [s]."""
        return self._work(index, place).host_s + self._engine_s(index, place)

    def _engine_s(self, index: int, place: int) -> float:
        """What the engine's own code takes the host in one pass over a segment."""
        prices, work = self.engine, self.work[index]
        if place == AGAIN and not (prices.is_rerun and work.again.host_s):
            return 0.0
        if place == BACKWARD:
            found = work.is_unit * prices.unit_back + work.num_weights * prices.parameter_back
        else:
            found = work.is_unit * prices.unit + work.num_weights * prices.parameter
        return found

    def _with_away(self, beside: Beside, num_bytes: int, place: int) -> Beside:
        """With activations that go to the host, or come back."""
        seconds = num_bytes / self.network.to_host
        if not OFFLOAD_RULES[self.given.setup.offload_activations].in_flight:
            return beside._replace(waited_s=beside.waited_s + seconds)
        if place == FORWARD:
            return beside._replace(stored_s=beside.stored_s + seconds)
        return beside._replace(fetched_s=beside.fetched_s + seconds)

    def _sent(self, work: Work) -> float:
        return sum(
            max(
                0.0,
                collective_seconds(each.kind, each.num_bytes, self.groups[each.group], self.network)
                - each.beside_s,
            )
            for each in work.messages
        )

    def update(self, run: Run) -> None:
        """The optimizer's step, and what goes with it."""
        case, clock = run.case, run.clock
        beside_s = {
            Hiding.NONE: 0.0,
            Hiding.AHEAD: clock.now_s,
            Hiding.BEHIND: run.last_backward_s,
        }
        for lane, seconds, words, hiding in self.updates:
            if lane is Lane.COMPUTE:
                run.add(OPTIMIZER, case.compute * seconds)
                clock.wait(lane, case.compute * seconds, "optimizer")
            elif lane is Lane.HOST:
                clock.wait(lane, max(0.0, case.host * seconds - beside_s[hiding]), words)
            else:
                clock.wait(lane, case.links * seconds, words)
        clock.asked_s += case.asked * self.step_asked_s
        clock.wait_for_launches(LAUNCHES)


def reads_each_loss(setup: TrainingSetup) -> bool:
    """Whether the loop looks at the loss of each micro-batch, so that the host waits for the GPU.

    transformers' Trainer does, where it keeps values that are no numbers out of its log (``logging_nan_inf_filter``, on by
    default: trainer.py, ``torch.isnan(tr_loss_step)``); Megatron's and torchtitan's loops look once a step.
    """
    own_loops = (KernelPreset.MEGATRON, KernelPreset.TORCHTITAN)
    return setup.chosen_engine is not Engine.MEGATRON and setup.kernels not in own_loops


def _counted(
    forward: Sequence[Visit], backward: Sequence[Visit], steps: int
) -> list[tuple[Visit | None, Visit | None, int]]:
    """A step's micro-batches, and how many of each: those between the first and the last are alike."""
    told = min(steps, MICRO_BATCHES)
    found: list[tuple[Visit | None, Visit | None, int]] = []
    for number in range(told):
        count = steps - told + 1 if number == 1 and told == MICRO_BATCHES else 1
        ahead = forward[min(number, len(forward) - 1)] if forward else None
        back = backward[min(number, len(backward) - 1)] if backward else None
        if found and found[-1][:2] == (ahead, back):
            count += found.pop()[2]
        found.append((ahead, back, count))
    return found
