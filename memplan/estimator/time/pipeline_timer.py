"""A step of a pipeline: every rank's passes, each begun when the stages beside it have sent what it needs.

What a rank waits for is not assumed of a schedule: it is what is left where its passes, in the order of the
schedule, find nothing to do.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.compute.lanes import Interval, Lane
from memplan.compute.links import collective_seconds
from memplan.compute.rates import Rates
from memplan.compute.roofline import segment_work
from memplan.estimator.time.exchanged import exchanged_apart
from memplan.estimator.time.timer import Case, Passed, Run, Timer
from memplan.fast_dataclass import replace
from memplan.hardware.network import Network
from memplan.memory.accounts import step_visits
from memplan.memory.programs.chunk_offload import LEAST_BYTES, passes_that_go, sent_bytes
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Part
from memplan.memory.sendable import sendable_bytes
from memplan.model.spec import ModelSpec
from memplan.training.activation_offload import ActivationOffload
from memplan.training.splitting.exchange import ExchangeKind, Ranks, Visit
from memplan.training.splitting.schedules import Pass, PassKind, passes_of

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


class _Turn(NamedTuple):
    """A pass in its turn; none is before the one that it waits for."""

    place: int
    alike: tuple[object, ...]
    """The key of passes of the same time."""
    share: float
    words: str
    awaited: int
    """The number of the turn that it waits for; -1: none."""
    is_sent: bool
    """What that one gives comes from another rank."""


class _Alike(NamedTuple):
    """Passes of a rank that are one and the same."""

    tape: int
    visit: Visit
    away_bytes: int
    forward: bool
    shares: float
    """How many they are."""


class _Lane:
    """A rank's passes, its host and its link to ranks that hold the same layers."""

    __slots__ = ("asked_s", "bound_s", "intervals", "late_s", "link_s", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked_s = 0.0
        self.link_s = 0.0
        self.late_s = 0.0
        """For which passes wait for weights, and the end for gradients."""
        self.bound_s = 0.0
        """For which they wait for the host."""
        self.intervals: list[tuple[float, float, str]] = []
        """When each begins and ends."""

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
        self.intervals.append((start, stop, words))
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
        self.alike: dict[int, dict[object, _Alike]] = {place: {} for place in self.visits}
        self.usual: dict[tuple[object, ...], object] = {}
        """Of passes of the same time the key of one, as ``alike`` has it."""
        for place in self.visits:
            self._sort(place)
        self.turns = self._turns()
        self.runs_ahead = given.setup.virtual_stages > 1
        """The host asks for passes ahead of the GPU: without virtual stages Megatron's exchanges make it wait for the GPU at each pass
        (``batch_p2p_sync``), with them they overlap (``overlap_p2p_comm``)."""
        leaves = [stage.tape.leaves for stage in given.stages]
        sizes = (sum(each.numel * each.dtype.num_bytes for each in own) for own in leaves)
        self.sent_bytes = max(sizes)

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

    def forward_alone_s(self, case: Case) -> float:
        """A micro-batch forward through the stages of the busiest rank, which the others wait for [s]."""
        seconds = {key: timer.forward_alone_s(case) for key, timer in self.timers.items()}
        return max(
            sum(
                seconds[id(self.given.stages[each.stage].tape)]
                for each in passes
                if each.kind is PassKind.FORWARD and each.micro_batch == 0
            )
            for passes in self.passes
        )

    def run(self, case: Case) -> Run:
        """All ranks' passes; of the busiest it is told what its time is spent on."""
        told: dict[object, _Told] = {}
        busy = {place: self._tell(case, place, told) for place in self.visits}
        place = max(busy, key=lambda each: busy[each].clock.now_s)
        run = busy[place]
        clock = run.clock
        simulated = self._simulate(case, told)
        lane = simulated.lanes[place]
        clock.exposed_s[Lane.LINK] += lane.late_s
        clock.host_bound_s += lane.bound_s
        run.add(BUBBLE, simulated.end_s - clock.now_s - lane.late_s - lane.bound_s)
        clock.now_s = simulated.end_s
        clock.intervals = [
            Interval(Lane.COMPUTE, start, stop, words, stop - start)
            for start, stop, words in (lane.intervals if case.is_expected else ())
        ]
        clock.path = _path_of(clock.intervals, clock.now_s)
        update = self._update(case, place)
        for drawn, own in (
            (clock.intervals, update.clock.intervals),
            (clock.path, update.clock.path),
        ):
            drawn += [_later(each, clock.now_s) for each in own]
        clock.now_s += update.clock.now_s
        for words, seconds in update.sums.items():
            run.add(words, seconds)
        clock.host_bound_s += update.clock.host_bound_s
        for lane_of, seconds in update.clock.exposed_s.items():
            clock.exposed_s[lane_of] += seconds
        return run

    def _sort(self, place: int) -> None:
        """See which passes of a rank are one and the same."""
        alike = self.alike[place]
        for each, visit in self._visited(place):
            tape = id(self.given.stages[each.stage].tape)
            forward = each.kind is PassKind.FORWARD
            goes = (each.stage, each.micro_batch) in self.going[place]
            key = tape, forward, visit.exchanges, goes
            shares = _share(each.kind) + (alike[key].shares if key in alike else 0)
            away = self.away_bytes[tape] if goes else 0
            alike[key] = _Alike(tape, visit, away, forward, shares)
            self.usual[self._key(each, place)] = key

    def _tell(self, case: Case, place: int, told: dict[object, _Told]) -> Run:
        """Each pass of a rank by itself, and their sum."""
        whole = Run(case)
        clock = whole.clock
        for key, each in self.alike[place].items():
            found = told.get(key)
            if found is None:
                found = told[key] = self._pass(case, each)
            clock.now_s += each.shares * found.seconds
            clock.host_bound_s += each.shares * found.run.clock.host_bound_s
            clock.slowed_s += each.shares * found.run.clock.slowed_s
            for lane, seconds in found.run.clock.exposed_s.items():
                clock.exposed_s[lane] += each.shares * seconds
            for words, seconds in found.run.sums.items():
                whole.add(words, each.shares * seconds)
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

    def _pass(self, case: Case, each: _Alike) -> _Told:
        alone = case._replace(asked=0.0) if self.runs_ahead else case
        run, timer = Run(alone), self.timers[each.tape]
        laid = timer.forward(each.visit) if each.forward else timer.backward(each.visit)
        asked = sum(part.repeats * part.asked_s for part in laid.stages)
        ahead = case.links * sum(part.beside.ahead_s for part in laid.stages)
        behind = case.links * sum(part.beside.behind_s for part in laid.stages)
        run.pass_over(_without_background(laid))
        slowed = case.interference * (ahead + behind)
        run.clock.now_s += slowed
        run.clock.slowed_s += slowed
        # What goes or comes back while it runs takes the rest of its way by itself.
        away_s = case.host * each.away_bytes / self.network.to_host
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

    def _turns(self) -> list[_Turn]:
        """All ranks' passes, each behind the one that it waits for: the same in every case."""
        owner = {each.stage: place for place, own in enumerate(self.passes) for each in own}
        given: dict[tuple[bool, int, int], int] = {}
        """Whose result it is, by direction, stage and micro-batch."""
        done = [0] * len(self.passes)
        found: list[_Turn] = []
        left = sum(map(len, self.passes))
        while len(found) < left:
            before = len(found)
            for place, own in enumerate(self.passes):
                while done[place] < len(own):
                    each = own[done[place]]
                    needed = _needed(each, self.pipeline.num_stages)
                    if needed is not None and needed not in given:
                        break
                    if each.kind is not PassKind.WEIGHT:
                        forward = each.kind is PassKind.FORWARD
                        given[forward, each.stage, each.micro_batch] = len(found)
                    found.append(
                        _Turn(
                            place,
                            self._key(each, place),
                            _share(each.kind),
                            f"{each.kind.value}{each.micro_batch}",
                            -1 if needed is None else given[needed],
                            needed is not None and owner[needed[1]] != place,
                        )
                    )
                    done[place] += 1
            assert len(found) > before, "a schedule whose passes wait for one another"
        return found

    def _simulate(self, case: Case, told: dict[object, _Told]) -> _Simulated:
        """When the last pass ends, and when each rank's passes run."""
        sent_s = case.links * collective_seconds(
            ExchangeKind.SEND, self.sent_bytes, Ranks(2, self.width), self.network
        )
        passes = {alike: told[key] for alike, key in self.usual.items()}
        lanes = [_Lane() for _ in self.passes]
        ended: list[float] = []
        for place, alike, share, words, awaited, is_sent in self.turns:
            ready = 0.0 if awaited < 0 else ended[awaited] + (sent_s if is_sent else 0.0)
            ended.append(lanes[place].run(ready, passes[alike], share, words))
        for lane in lanes:
            lane.end()
        return _Simulated(max(lane.now_s for lane in lanes), lanes)


def _path_of(passes: Sequence[Interval], end_s: float) -> list[Interval]:
    """A rank's passes, and what is between them: waiting for other stages."""
    found, now_s = list[Interval](), 0.0
    for each in (*passes, Interval(Lane.COMPUTE, end_s, end_s, "", 0.0)):
        if each.start_s > now_s:
            waited_s = each.start_s - now_s
            found.append(Interval(Lane.STAGES, now_s, each.start_s, BUBBLE, waited_s))
        if each.busy_s:
            found.append(each)
        now_s = each.stop_s
    return found


def _later(each: Interval, seconds: float) -> Interval:
    return each._replace(start_s=each.start_s + seconds, stop_s=each.stop_s + seconds)


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


def _needed(each: Pass, num_stages: int) -> tuple[bool, int, int] | None:
    """Whose result a pass waits for, by direction, stage and micro-batch; None: nobody's."""
    if each.kind is PassKind.WEIGHT:
        return None
    forward = each.kind is PassKind.FORWARD
    beside = each.stage - 1 if forward else each.stage + 1
    return (forward, beside, each.micro_batch) if 0 <= beside < num_stages else None
