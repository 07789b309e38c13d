"""A step's stages, for any case: the tape's operations with what the engine exchanges between them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memplan.compute.lanes import Clock, Lane, Stage
from memplan.compute.links import collective_seconds
from memplan.compute.rates import UPDATE_SHARE, Rates
from memplan.compute.roofline import SegmentWork, Work
from memplan.hardware.network import Network
from memplan.memory.accounts import MICRO_BATCHES
from memplan.memory.ledger import Part
from memplan.memory.rank import RankInput
from memplan.training.exchange import Exchange, ExchangeKind, Hiding, Ranks, Visit

PRODUCTS = "products of matrices"
ATTENTION = "attention"
MEMORY = "reading and writing the GPU's memory"
ENGINE_COPIES = "the engine's copies"
OPTIMIZER = "the optimizer's step"
LAUNCHES = "waiting for the host to launch kernels"
LINKS = "communication that computing does not hide"
HOST = "transfers to and from the host, and its optimizer"


class Case(NamedTuple):
    """How far times are from the expected ones, as factors."""

    compute: float
    links: float
    host: float
    interference: float
    """Of an exchange's time, by which computing beside it takes longer."""


EXPECTED = Case(1.0, 1.0, 1.0, 0.12)
"""NCCL takes 16 of an H100's 132 multiprocessors while it runs."""
FAST = Case(0.9, 0.85, 0.6, 0.0)
SLOW = Case(1.15, 1.4, 1.8, 0.2)
"""Cards differ by 10 % in clocks under load; links by how busy they are; hosts most of all."""

_MOVED = frozenset({ExchangeKind.COPY, ExchangeKind.UPDATE})
"""In the GPU's own memory."""
_TO_HOST = frozenset({ExchangeKind.TO_GPU, ExchangeKind.TO_HOST})


class Resource(NamedTuple):
    """What a step waits for, and for how long."""

    words: str
    seconds: float


class Beside(NamedTuple):
    """What an engine exchanges while a segment runs, all repetitions together [s]."""

    copied_s: float = 0.0
    blocking_s: float = 0.0
    ahead_s: float = 0.0
    behind_s: float = 0.0
    fetched_s: float = 0.0
    stored_s: float = 0.0
    waited_s: float = 0.0
    """For the host."""


_NOTHING = Beside()


class Run:
    """One case, run through."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = Clock(interference=case.interference)
        self.sums: dict[str, float] = {}

    def add(self, words: str, seconds: float) -> None:
        """Count it with what a step consists of."""
        if seconds > 0:
            self.sums[words] = self.sums.get(words, 0.0) + seconds

    def shares(self) -> tuple[Resource, ...]:
        """What the step consists of, the longest first."""
        clock = self.clock
        waits = {
            LAUNCHES: clock.host_bound_s, LINKS: clock.exposed_s[Lane.LINK],
            HOST: clock.exposed_s[Lane.HOST],
        }  # fmt: skip
        found = [Resource(*each) for each in (*self.sums.items(), *waits.items()) if each[1] > 0]
        return tuple(sorted(found, key=lambda each: -each.seconds))


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
    ) -> None:
        self.given = given
        self.work = work
        self.network = network
        self.rates = rates
        self.split = Ranks(given.setup.tensor_parallel)
        self.known: dict[tuple[ExchangeKind, int, Ranks], float] = {}
        self.passes: dict[str, list[Mapping[int, Beside]]] = {}
        self.updates: list[tuple[Exchange, int]] = []
        for visit in visits:
            if visit.part in (Part.FORWARD, Part.BACKWARD):
                self.passes.setdefault(visit.part, []).append(self._by_segment(visit))
            elif visit.part in (Part.STEP, Part.OVERFLOW):
                self.updates += visit.exchanges
        self.sent = [[self._sent(each) for each in segment] for segment in work]

    def run(self, case: Case) -> Run:
        """Every micro-batch, then the update."""
        run = Run(case)
        steps = self.given.setup.gradient_accumulation_steps
        told = min(steps, MICRO_BATCHES)
        for number in range(told):
            begin = run.clock.now_s, dict(run.clock.exposed_s), run.clock.host_bound_s
            sums = dict(run.sums)
            self._micro_batch(run, number)
            if number == 1 and steps > told:
                self._repeat(run, steps - told, begin, sums)
        self._update(run)
        return run

    def _repeat(
        self,
        run: Run,
        more: int,
        begin: tuple[float, dict[Lane, float], float],
        sums: Mapping[str, float],
    ) -> None:
        """Those between the first and the last are alike: so many more like the one that has run."""
        clock = run.clock
        now, exposed, bound = begin
        clock.host_bound_s += more * (clock.host_bound_s - bound)
        for lane, before in exposed.items():
            clock.exposed_s[lane] += more * (clock.exposed_s[lane] - before)
        for words, seconds in list(run.sums.items()):
            run.sums[words] = seconds + more * (seconds - sums.get(words, 0.0))
        clock.skip(more * (clock.now_s - now))

    def _micro_batch(self, run: Run, number: int) -> None:
        tape, passes = self.given.tape, self.given.passes
        forward, backward = self._told(Part.FORWARD, number), self._told(Part.BACKWARD, number)
        run.clock.run(
            self._stage(run, each.name, each.repeat, [(each.index, 0)], forward.get(each.index))
            for each in tape.segments
        )
        run.clock.run(self._stage(run, "", 1, [], forward[-1]) for _ in (0,) if -1 in forward)
        done: set[int] = set()
        stages = []
        for each in passes.backward:
            index = each.segment.index
            beside = None if index in done else backward.get(index)
            done.add(index)
            name = f"{each.segment.name}, backward"
            stages.append(self._stage(run, name, each.repeats, [(index, 1), (index, 2)], beside))
        if -1 in backward:
            stages.append(self._stage(run, "reduction", 1, [], backward[-1]))
        run.clock.run(stages)

    def _told(self, part: Part, number: int) -> Mapping[int, Beside]:
        found = self.passes.get(part, ())
        return found[min(number, len(found) - 1)] if found else {}

    def _stage(
        self,
        run: Run,
        words: str,
        repeats: int,
        works: Sequence[tuple[int, int]],
        beside: Beside | None,
    ) -> Stage:
        case = run.case
        device = asked = sent = 0.0
        for index, place in works:
            work = self.work[index][place]
            device += work.device_s
            asked += work.host_s
            sent += self.sent[index][place]
            run.add(PRODUCTS, repeats * case.compute * work.products_s)
            run.add(ATTENTION, repeats * case.compute * work.attention_s)
            run.add(MEMORY, repeats * case.compute * work.memory_s)
        beside = beside or _NOTHING
        run.add(ENGINE_COPIES, case.compute * beside.copied_s)
        return Stage(
            words=words,
            repeats=repeats,
            compute_s=case.compute * (device + beside.copied_s / repeats),
            host_s=case.compute * asked,
            blocking_s=case.links * (beside.blocking_s + repeats * sent),
            ahead_s=case.links * beside.ahead_s,
            behind_s=case.links * beside.behind_s,
            fetched_s=case.host * beside.fetched_s,
            stored_s=case.host * beside.stored_s,
            waited_s=case.host * beside.waited_s,
        )

    def _sent(self, work: Work) -> float:
        return sum(
            collective_seconds(each.kind, each.num_bytes, self.split, self.network)
            for each in work.messages
        )

    def _by_segment(self, visit: Visit) -> Mapping[int, Beside]:
        sums: dict[int, list[float]] = {}
        for exchange, count in visit.exchanges:
            found = sums.setdefault(exchange.segment, [0.0] * len(Beside._fields))
            found[_place(exchange)] += count * self.seconds(exchange)
        return {segment: Beside(*found) for segment, found in sums.items()}

    def _update(self, run: Run) -> None:
        """The optimizer's step, and what goes with it."""
        case, clock = run.case, run.clock
        for exchange, count in self.updates:
            kind, seconds = exchange.kind, count * self.seconds(exchange)
            if kind in _MOVED:
                run.add(OPTIMIZER, case.compute * seconds)
                clock.wait(Lane.COMPUTE, case.compute * seconds, "optimizer")
            elif kind in _TO_HOST or kind is ExchangeKind.HOST_UPDATE:
                clock.wait(Lane.HOST, case.host * seconds, kind.value)
            else:
                clock.wait(Lane.LINK, case.links * seconds, kind.value)

    def seconds(self, exchange: Exchange) -> float:
        """One exchange by itself [s]."""
        kind, network = exchange.kind, self.network
        if kind is ExchangeKind.COPY:
            return exchange.num_bytes / self.rates.bytes_per_s
        if kind is ExchangeKind.UPDATE:
            return exchange.num_bytes / (UPDATE_SHARE * self.rates.bytes_per_s)
        if kind in _TO_HOST:
            return exchange.num_bytes / network.to_host
        if kind is ExchangeKind.HOST_UPDATE:
            return exchange.num_bytes * network.gpus_per_node / network.host_memory
        key = kind, exchange.num_bytes, exchange.ranks
        found = self.known.get(key)
        if found is None:
            found = collective_seconds(kind, exchange.num_bytes, exchange.ranks, network)
            self.known[key] = found
        return found


def _place(exchange: Exchange) -> int:
    """Which field of ``Beside`` counts it."""
    if exchange.kind in _MOVED:
        return 0
    if exchange.kind in _TO_HOST or exchange.kind is ExchangeKind.HOST_UPDATE:
        return {Hiding.NONE: 6, Hiding.AHEAD: 4, Hiding.BEHIND: 5}[exchange.hiding]
    return {Hiding.NONE: 1, Hiding.AHEAD: 2, Hiding.BEHIND: 3}[exchange.hiding]
