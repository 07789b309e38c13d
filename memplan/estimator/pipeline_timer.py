"""A step of a pipeline: every rank's passes, each begun when the stages beside it have sent what it needs.

What a rank waits for is not assumed of a schedule: it is what is left where its passes, in the order of the
schedule, find nothing to do.
"""

from collections.abc import Iterator
from typing import NamedTuple

from memplan.compute.lanes import Interval, Lane
from memplan.compute.links import collective_seconds
from memplan.compute.rates import Rates
from memplan.compute.roofline import segment_work
from memplan.estimator.exchanged import exchanged_apart
from memplan.estimator.timer import Case, Passed, Run, Timer
from memplan.fast_dataclass import replace
from memplan.hardware.network import Network
from memplan.memory.accounts import step_visits
from memplan.memory.ledger import Part
from memplan.memory.programs.chunk_offload import LEAST_BYTES, passes_that_go, sent_bytes
from memplan.memory.rank import RankInput
from memplan.memory.sendable import sendable_bytes
from memplan.model.spec import ModelSpec
from memplan.training.activation_offload import ActivationOffload
from memplan.training.exchange import ExchangeKind, Ranks, Visit
from memplan.training.schedules import Pass, PassKind, passes_of

BUBBLE = "waiting for other stages of the pipeline"
INPUT_SHARE = 0.5
"""Of a backward pass, what the gradients of inputs take where those of weights come apart: one of the two
products of each."""


_SILENT = Visit("", ())


class _Told(NamedTuple):
    """A pass, run through."""

    seconds: float
    run: Run
    asked_s: float
    """What it takes the host to ask for it, where the host runs ahead from pass to pass."""
    ahead_s: float
    """Weights that are gathered ahead of it, beside whatever the rank computes."""
    behind_s: float
    """Gradients that are reduced from its beginning on, beside it and what follows it."""


class _Lane:
    """A rank's passes, its host and its link to ranks that hold the same layers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked_s = 0.0
        self.link_s = 0.0
        self.late_s = 0.0
        """For which passes wait for weights, and the end for gradients."""
        self.bound_s = 0.0
        """For which they wait for the host."""
        self.intervals: list[Interval] = []

    def run(self, ready_s: float, told: _Told, share: float, words: str) -> float:
        """One pass, or a share of it; when it ends.

        Gathers are asked for ahead, one chunk after the other from the step's beginning on (``param_sync_func`` of Megatron's
        schedules), reductions where a chunk's last pass begins (``grad_sync_func``): neither is waited for before it is needed.
        """
        start = max(self.now_s, ready_s)
        stop = start + share * told.seconds
        self.asked_s += share * told.asked_s
        bound = max(0.0, self.asked_s - stop)
        stop += bound
        self.bound_s += bound
        if told.ahead_s:
            self.link_s += share * told.ahead_s
            late = max(0.0, self.link_s - stop)
            stop += late
            self.late_s += late
        if told.behind_s:
            self.link_s = max(self.link_s, start) + share * told.behind_s
        self.now_s = stop
        self.intervals.append(Interval(Lane.COMPUTE, start, stop, words, stop - start))
        return stop

    def end(self) -> None:
        """What is reduced has to be there before the update."""
        late = max(0.0, self.link_s - self.now_s)
        self.now_s += late
        self.late_s += late


class _Simulated(NamedTuple):
    """All ranks' passes beside one another."""

    end_s: float
    lanes: list[_Lane]


class PipelineTimer:
    """A step of all ranks of a pipeline."""

    def __init__(
        self, given: RankInput, model: ModelSpec, *, network: Network, rates: Rates
    ) -> None:
        pipeline = given.setup.pipeline
        assert pipeline is not None
        self.given = given
        self.network = network
        self.pipeline = pipeline
        self.width = given.setup.num_gpus // pipeline.degree
        self.timers = {
            id(stage.tape): Timer(
                replace(given, tape=stage.tape, passes=stage.passes, stages=()),
                segment_work(stage.tape, model, rates),
                (),
                network=network,
                rates=rates,
            )
            for stage in given.stages
        }
        self.passes = [self._passes_of(place) for place in range(pipeline.degree)]
        self.visits = {
            place: step_visits(given, rank=place * self.width) for place in self._apart()
        }
        """Of each kind of rank one."""
        self.going = [self._going_of(place) for place in range(pipeline.degree)]
        """Of stages and micro-batches, those of which something goes to CPU RAM."""
        self.away_bytes = self._away_bytes()
        self.runs_ahead = given.setup.virtual_stages > 1
        """The host asks for passes ahead of the GPU: without virtual stages Megatron's exchanges make it wait for the GPU at each pass
        (``batch_p2p_sync``), with them they overlap (``overlap_p2p_comm``)."""
        leaves = [leaf for stage in given.stages for leaf in stage.tape.leaves[:1]]
        self.sent_bytes = max((each.numel * each.dtype.num_bytes for each in leaves), default=0)

    def _going_of(self, place: int) -> set[tuple[int, int]]:
        chunks = self.given.setup.offload_activations is ActivationOffload.CHUNKS
        return passes_that_go(self.passes[place]) if chunks else set()

    def _away_bytes(self) -> dict[int, int]:
        """What goes of one pass, by its stage's tape; while another one like it runs."""
        if not any(self.going):
            return {}
        ratio = self.given.setup.offload_activations_ratio
        return {
            id(stage.tape): sent_bytes(sendable_bytes(stage.tape, stage.passes, LEAST_BYTES), ratio)
            for stage in self.given.stages
        }

    def _apart(self) -> list[int]:
        """The first rank and the last, and those in between that have a stage like none before."""
        last = self.pipeline.degree - 1
        seen: set[int] = set()
        found = []
        for place in (0, last, *range(last // 2, last), *range(1, last // 2)):
            own = {id(self.given.stages[each.stage].tape) for each in self.passes[place]}
            if place in (0, last) or own - seen:
                found.append(place)
                seen |= own
        return sorted(set(found))

    def _passes_of(self, place: int) -> tuple[Pass, ...]:
        pipeline = self.pipeline
        return passes_of(pipeline, place)

    def run(self, case: Case) -> Run:
        """All ranks' passes; of the busiest it is told what its time is spent on."""
        told: dict[object, _Told] = {}
        usual: dict[object, _Told] = {}
        busy = {place: self._tell(case, place, told, usual) for place in self.visits}
        place = max(busy, key=lambda each: busy[each].clock.now_s)
        run = busy[place]
        clock = run.clock
        simulated = self._simulate(case, usual)
        lane = simulated.lanes[place]
        clock.exposed_s[Lane.LINK] += lane.late_s
        clock.host_bound_s += lane.bound_s
        run.add(BUBBLE, simulated.end_s - clock.now_s - lane.late_s - lane.bound_s)
        clock.now_s = simulated.end_s
        clock.intervals = lane.intervals
        update = self._update(case, place)
        clock.now_s += update.clock.now_s
        for words, seconds in update.sums.items():
            run.add(words, seconds)
        clock.host_bound_s += update.clock.host_bound_s
        for lane_of, seconds in update.clock.exposed_s.items():
            clock.exposed_s[lane_of] += seconds
        return run

    def _tell(
        self, case: Case, place: int, told: dict[object, _Told], usual: dict[object, _Told]
    ) -> Run:
        """Each pass of a rank by itself, and their sum."""
        whole = Run(case)
        clock = whole.clock
        for each, visit in self._visited(place):
            tape = self.given.stages[each.stage].tape
            forward = each.kind is PassKind.FORWARD
            goes = (each.stage, each.micro_batch) in self.going[place]
            key = id(tape), forward, visit.exchanges, goes
            found = told.get(key)
            if found is None:
                away = self.away_bytes[id(tape)] if goes else 0
                found = told[key] = self._pass(case, id(tape), visit, away, forward=forward)
            share = _share(each.kind)
            usual[self._key(each, place)] = found
            clock.now_s += share * found.seconds
            clock.host_bound_s += share * found.run.clock.host_bound_s
            clock.slowed_s += share * found.run.clock.slowed_s
            for lane, seconds in found.run.clock.exposed_s.items():
                clock.exposed_s[lane] += share * seconds
            for words, seconds in found.run.sums.items():
                whole.add(words, share * seconds)
        return whole

    def _visited(self, place: int) -> Iterator[tuple[Pass, Visit]]:
        """Each pass of a rank with what is exchanged in it.

        Of passes that are alike a few are told: the others are like the last one told of their kind.
        """
        told = {each.number: each for each in self.visits[place]}
        latest: dict[tuple[PassKind, int], Visit] = {}
        for number, each in enumerate(self.passes[place]):
            found = told.get(number)
            if found is not None:
                latest[each.kind, each.stage] = found
            yield each, latest.get((each.kind, each.stage), _SILENT)

    def _key(self, each: Pass, place: int) -> tuple[object, ...]:
        """Passes of the same time: in a first micro-batch weights may be gathered, in a last one gradients
        reduced."""
        is_last = each.micro_batch == self.pipeline.num_micro_batches - 1
        goes = (each.stage, each.micro_batch) in self.going[place]
        return (
            id(self.given.stages[each.stage].tape), each.kind, not each.micro_batch, is_last, goes,
        )  # fmt: skip

    def _pass(
        self, case: Case, tape: int, visit: Visit, away_bytes: int, *, forward: bool
    ) -> _Told:
        alone = case._replace(asked=0.0) if self.runs_ahead else case
        run, timer = Run(alone), self.timers[tape]
        laid = timer.forward(visit) if forward else timer.backward(visit)
        asked = sum(each.repeats * each.asked_s for each in laid.stages)
        ahead = case.links * sum(each.beside.ahead_s for each in laid.stages)
        behind = case.links * sum(each.beside.behind_s for each in laid.stages)
        run.pass_over(_without_background(laid))
        slowed = case.interference * (ahead + behind)
        run.clock.now_s += slowed
        run.clock.slowed_s += slowed
        # What goes or comes back while it runs takes the rest of its way by itself.
        away_s = case.host * away_bytes / self.network.to_host
        run.clock.wait(Lane.HOST, away_s - run.clock.now_s, "activations")
        asked_s = case.asked * asked if self.runs_ahead else 0.0
        return _Told(run.clock.now_s, run, asked_s, ahead, behind)

    def _update(self, case: Case, place: int) -> Run:
        run = Run(case)
        timer = next(iter(self.timers.values()))
        timer.updates = [
            each
            for visit in self.visits[place]
            if visit.part in (Part.STEP, Part.OVERFLOW)
            for each in exchanged_apart(visit, timer.network, timer.rates)
        ]
        timer.update(run)
        return run

    def _simulate(self, case: Case, usual: dict[object, _Told]) -> _Simulated:
        """When the last pass ends, and when each rank's passes run."""
        sent_s = case.links * collective_seconds(
            ExchangeKind.SEND, self.sent_bytes, Ranks(2, self.width), self.network
        )
        num_stages = self.pipeline.num_stages
        owner = {each.stage: place for place, own in enumerate(self.passes) for each in own}
        ended: dict[tuple[bool, int, int], float] = {}
        done = [0] * len(self.passes)
        lanes = [_Lane() for _ in self.passes]
        left = sum(map(len, self.passes))
        while left:
            before = left
            for place, own in enumerate(self.passes):
                while done[place] < len(own):
                    each = own[done[place]]
                    ready = _ready(each, ended, owner, place, sent_s, num_stages)
                    if ready is None:
                        break
                    words = f"{each.kind.value}{each.micro_batch}"
                    told = usual[self._key(each, place)]
                    stop = lanes[place].run(ready, told, _share(each.kind), words)
                    if each.kind is not PassKind.WEIGHT:
                        forward = each.kind is PassKind.FORWARD
                        ended[forward, each.stage, each.micro_batch] = stop
                    done[place] += 1
                    left -= 1
            assert left < before, "a schedule whose passes wait for one another"
        for lane in lanes:
            lane.end()
        return _Simulated(max(lane.now_s for lane in lanes), lanes)


def _without_background(laid: Passed) -> Passed:
    """A pass without what runs beside it and those that follow."""
    stages = tuple(
        each._replace(beside=each.beside._replace(ahead_s=0.0, behind_s=0.0))
        for each in laid.stages
    )
    exchanges = any(each.sent_s > 0 or any(each.beside[1:]) for each in stages)
    return Passed(stages, laid.sums, exchanges)


def _share(kind: PassKind) -> float:
    if kind is PassKind.INPUT:
        return INPUT_SHARE
    return 1 - INPUT_SHARE if kind is PassKind.WEIGHT else 1.0


def _ready(
    each: Pass,
    ended: dict[tuple[bool, int, int], float],
    owner: dict[int, int],
    place: int,
    sent_s: float,
    num_stages: int,
) -> float | None:
    """When a pass has what it needs; None: not yet."""
    if each.kind is PassKind.WEIGHT:
        return 0.0
    forward = each.kind is PassKind.FORWARD
    beside = each.stage - 1 if forward else each.stage + 1
    if not 0 <= beside < num_stages:
        return 0.0
    found = ended.get((forward, beside, each.micro_batch))
    if found is None:
        return None
    return found if owner[beside] == place else found + sent_s
