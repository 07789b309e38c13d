"""What is beside each pass of a pipeline's step, and which passes tell all.

Between its first passes and its last one a stage's program is after each pass where it was before. Of
the passes of one kind through a stage, with the same gathered and the same gradients there, it is then
enough to play one: the others are told from it by what is in flight beside them. A step is followed once
for all batches, sizes written as symbols (``memplan.memory.crowds``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.crowds import Crowd, Sizes, counts_of, symbol, uncovered
from memplan.memory.outline import NO_CROWD
from memplan.memory.passes import Height
from memplan.memory.programs.chunk_offload import ChunkOffload, chunk_sizes
from memplan.memory.programs.pipeline_runtime import StageLink, runtime_of
from memplan.memory.rank import RankInput, Stage
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.spots import height_entries
from memplan.training.splitting.parallelism import PipelineParallel, PipelineRuntime
from memplan.training.splitting.schedules import (
    Pass,
    PassKind,
    passes_of,
    rank_stages,
    wanted_stages,
)

ALWAYS_PLAYED = 2
"""First passes of a kind through a stage: the second finds what the first has made."""
_PER_STAGE = 5
"""Sizes of a stage: what a micro-batch holds after the forward pass, after the one for the input, with
some of it in CPU RAM; what it receives and what it returns."""


class Shape(NamedTuple):
    """All that a rank's plan depends on."""

    pipeline: PipelineParallel
    place: int
    kinds: tuple[int, ...]
    """For each of the rank's stages, the number of those that are like it."""
    ends: tuple[tuple[bool, bool, bool], ...]
    """For each kind, whether anything is received, returned, sent to CPU RAM."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The rank's own, by number."""
        pipeline = self.pipeline
        return rank_stages(
            pipeline.schedule,
            num_ranks=pipeline.degree,
            num_virtual=pipeline.num_virtual,
            rank=self.place,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A rank's step, followed."""

    passes: tuple[Pass, ...]
    wanted: tuple[tuple[int, ...], ...]
    """Before each pass, the stages whose weights are gathered by then, where the schedule says so."""
    groups: tuple[int, ...]
    """Of each pass, the group of passes that are told from one."""
    behind: Mapping[int, int]
    """The group of what is there behind the last pass of a stage, by that pass's number."""
    played: frozenset[int]
    """Numbers of the passes that have to be played for its fullest moments."""
    crowds: tuple[tuple[Crowd, ...], ...]
    """By group, what may be beside it."""
    begun: int
    """The group of what is there before the first step."""
    returned: int
    """When the schedule's function returns."""
    rest: int
    """Between steps."""
    spots: frozenset[tuple[tuple[PassKind, int], bool, int]]
    """The kind of each pass and the place of its stage among the rank's; whether every kind has run; and
    its group."""


class Level(NamedTuple):
    """How much is beside the passes of a step, by their kind and the place of their stage [bytes]."""

    ever: dict[tuple[PassKind, int], int]
    """The most at any time."""
    settled: dict[tuple[PassKind, int], int]
    """The most once each kind of pass has run, when the stages' own programs hold most."""

    def outweighs(self, other: "Level") -> bool:
        """Whether another rank with stages like these cannot be fuller."""
        return all(self.settled.get(key, -1) >= most for key, most in other.ever.items())


def shape_of(given: RankInput, place: int) -> Shape:
    """What the plan of a place in the pipeline depends on."""
    pipeline = given.setup.pipeline
    assert pipeline is not None
    numbers = rank_stages(
        pipeline.schedule, num_ranks=pipeline.degree, num_virtual=pipeline.num_virtual, rank=place
    )
    own = [given.stages[number] for number in numbers]
    unlike = {stage: number for number, stage in enumerate(dict.fromkeys(own))}
    first = [numbers[own.index(stage)] for stage in unlike]
    return Shape(pipeline, place, tuple(unlike[stage] for stage in own), ends_of(given, first))


def ends_of(given: RankInput, numbers: Sequence[int]) -> "tuple[tuple[bool, bool, bool], ...]":
    """Of stages, whether anything is received, returned, sent to CPU RAM."""
    away = chunk_sizes(given, numbers)
    links = {number: StageLink.of(given.stages[number].tape) for number in numbers}
    return tuple(
        (link.received_bytes > 0, link.returned_bytes > 0, away.get(number, 0) > 0)
        for number, link in links.items()
    )


def sizes_of(given: RankInput, place: int) -> Sizes:
    """A batch's sizes, in the order in which a plan counts them."""
    pipeline = given.setup.pipeline
    assert pipeline is not None
    numbers = rank_stages(
        pipeline.schedule, num_ranks=pipeline.degree, num_virtual=pipeline.num_virtual, rank=place
    )
    away = chunk_sizes(given, numbers)
    sizes: list[int] = [1]
    parts: list[tuple[Entry, ...]] = [()]
    seen: set[Stage] = set()
    for number in numbers:
        stage = given.stages[number]
        if stage in seen:
            continue
        seen.add(stage)
        passes, link = stage.passes, StageLink.of(stage.tape)
        flying = [
            in_flight(passes.after_forward),
            in_flight(passes.after_inputs),
            in_flight(passes.after_forward, away.get(number, 0)),
        ]
        sizes += [sum(each.num_bytes for each in entries) for entries in flying]
        sizes += [link.received_bytes, link.returned_bytes]
        parts += [*flying, (), ()]
    sizes.append(max(away.values(), default=0))
    parts.append(())
    return Sizes(tuple(sizes), tuple(parts))


def in_flight(height: Height, away_bytes: int = 0) -> tuple[Entry, ...]:
    """What a micro-batch holds there, but for what is in CPU RAM."""
    found: list[Entry] = []
    for each in height_entries(height):
        gone = min(each.num_bytes, away_bytes)
        away_bytes -= gone
        origin = f"{each.origin}, of micro-batches in flight"
        found.append(Entry(each.kind, each.num_bytes - gone, origin))
    return tuple(found)


def level_of(given: RankInput, place: int) -> Level:
    """How much is beside a rank's passes."""
    plan, sizes = plan_of(shape_of(given, place)), sizes_of(given, place)
    beside = [sizes.largest(each)[0] for each in plan.crowds]
    found = Level({}, {})
    for spot, is_settled, group in plan.spots:
        found.ever[spot] = max(found.ever.get(spot, 0), beside[group])
        if is_settled:
            found.settled[spot] = max(found.settled.get(spot, 0), beside[group])
    return found


@lru_cache(maxsize=1024)
def plan_of(shape: Shape) -> Plan:
    """Follow a rank's step."""
    return _Follower(shape).follow()


class _Told:
    """Which passes of a step are told from one, and which have to be played."""

    def __init__(self, passes: tuple[Pass, ...], stages: tuple[int, ...]) -> None:
        self.last = {each.stage: number for number, each in enumerate(passes)}
        """By stage, the number of its last pass."""
        self.played = set(self.last.values())
        self.groups: list[int] = []
        self.behind: dict[int, int] = {}
        self.spots: set[tuple[tuple[PassKind, int], bool, int]] = set()
        self._order = {stage: position for position, stage in enumerate(stages)}
        self._num_kinds = len({(each.kind, each.stage) for each in passes}) * ALWAYS_PLAYED
        self._seen: dict[tuple[PassKind, int], int] = {}
        self._num_done = 0
        self._alone: frozenset[int] = frozenset()
        """Stages whose last backward pass was one for weights alone."""
        self._copied: frozenset[int] = frozenset()
        self._gathered: frozenset[int] = frozenset()

    def key(self, number: int, each: Pass, gathered: frozenset[int] | None) -> object:
        """What makes a pass like another; ``gathered``: the stages whose weights are there, where that is said."""
        if gathered is not None:
            self._gathered = gathered
            self._copied &= gathered
        is_last = number == self.last[each.stage]
        stood = self._num_done, self._gathered, self._copied, self._alone
        return each.kind, each.stage, *stood, is_last

    def add(self, number: int, each: Pass, group: int) -> None:
        """The pass has run, and is told from a group."""
        kind, stage, _ = each
        self.groups.append(group)
        spot = kind, self._order[stage]
        self.spots.add((spot, self._num_done >= self._num_kinds, group))
        count = self._seen[kind, stage] = self._seen.get((kind, stage), 0) + 1
        if count <= ALWAYS_PLAYED:
            self.played.add(number)
            self._num_done += 1
        self._copied |= {stage}
        if kind is PassKind.WEIGHT:
            self._alone |= {stage}
        elif kind is not PassKind.FORWARD:
            self._alone -= {stage}


class _Follower:
    """Follows a step by counts alone."""

    def __init__(self, shape: Shape) -> None:
        pipeline, stages = shape.pipeline, shape.stages
        self.stages = stages
        self.passes = passes_of(pipeline, shape.place)
        self.wanted: tuple[tuple[int, ...], ...] = ()
        if not pipeline.schedule.is_single and pipeline.runtime is PipelineRuntime.TORCH:
            self.wanted = tuple(wanted_stages(self.passes))
        self.num_sizes = _PER_STAGE * len(shape.ends) + 1
        self.ledger = _Sum()
        first = {
            stage: 1 + _PER_STAGE * kind for stage, kind in zip(stages, shape.kinds, strict=True)
        }
        """By stage, the number of its first size."""
        self.sizes = first
        links = {}
        goes = {}
        for stage, kind in zip(stages, shape.kinds, strict=True):
            has_received, has_returned, goes_away = shape.ends[kind]
            links[stage] = StageLink(
                received_bytes=symbol(first[stage] + 3) * has_received,
                returned_bytes=symbol(first[stage] + 4) * has_returned,
                is_first=not stage,
                is_last=stage == pipeline.num_stages - 1,
            )
            goes[stage] = symbol(first[stage] + 2) * goes_away
        self.links = links
        self.parked: dict[tuple[int, int], Block] = {}
        self.runtime = runtime_of(pipeline, links, self.ledger)
        self.offload: ChunkOffload | None = None
        if any(goes.values()):
            self.offload = ChunkOffload(
                goes, symbol(self.num_sizes), self.passes, self.ledger, self._send
            )
        self.sums: list[dict[int, _Lines]] = [{0: ()}]
        """By group, the sums that were met, and what they are for."""
        self.by_key: dict[object, int] = {"nothing": NO_CROWD}

    def follow(self) -> Plan:
        """Follow all passes, and what comes around them."""
        self.runtime.begin()
        if self.offload is not None:
            self.offload.begin()
        begun = self._group("begun")
        self.runtime.begin_step()
        told = _Told(self.passes, self.stages)
        for number, each in enumerate(self.passes):
            gathered = frozenset(self.wanted[number]) if self.wanted else None
            if self.offload is not None:
                self.offload.before(each)
            self._begin(each)
            key = told.key(number, each, gathered)
            if key not in self.by_key:
                told.played.add(number)
            told.add(number, each, self._group(key))
            self._end(each)
            if number == told.last[each.stage]:
                told.behind[number] = self._group(("behind", number))
            if self.offload is not None:
                self.offload.after(each)
        returned = self._return()
        rest = self._group("rest")
        return Plan(
            passes=self.passes,
            wanted=self.wanted,
            groups=tuple(told.groups),
            behind=told.behind,
            played=frozenset(told.played),
            crowds=tuple(
                uncovered(self._crowd(total, lines) for total, lines in each.items())
                for each in self.sums
            ),
            begun=begun,
            returned=returned,
            rest=rest,
            spots=frozenset(told.spots),
        )

    def _group(self, key: object) -> int:
        """The group of what is told alike; what is held now may be beside it."""
        number = self.by_key.setdefault(key, len(self.sums))
        if number == len(self.sums):
            self.sums.append({})
        found, ledger = self.sums[number], self.ledger
        if ledger.total not in found:
            found[ledger.total] = tuple(ledger.lines.items())
        return number

    def _return(self) -> int:
        """The schedule's function returns; what it makes for a moment counts too."""
        self.ledger.watch = lambda: self._group("returned")
        self.runtime.end_step()
        self.ledger.watch = None
        return self._group("returned")

    def _crowd(self, total: int, lines: "_Lines") -> Crowd:
        num_sizes = self.num_sizes
        return Crowd(
            counts_of(total, num_sizes=num_sizes),
            tuple(
                (kind, name, counts_of(each, num_sizes=num_sizes)) for (kind, name), each in lines
            ),
        )

    def _waits(self, each: Pass) -> bool:
        """Whether nothing is computed: the first stage's input wants no gradient."""
        return each.kind is PassKind.INPUT and self.links[each.stage].is_first

    def _begin(self, each: Pass) -> None:
        """The pass's own micro-batch is none of the others."""
        if each.kind is PassKind.FORWARD:
            self.runtime.before_forward(each)
        if each.kind is not PassKind.FORWARD and not self._waits(each):
            self.ledger.free(self.parked.pop((each.stage, each.micro_batch)))

    def _end(self, each: Pass) -> None:
        """It waits for its next pass, or is over."""
        if self._waits(each):
            return
        first = self.sizes[each.stage]
        if each.kind is PassKind.FORWARD:
            self.parked[each.stage, each.micro_batch] = self.ledger.allocate(symbol(first))
            self.runtime.after_forward(each)
            return
        if each.kind is PassKind.INPUT:
            self.parked[each.stage, each.micro_batch] = self.ledger.allocate(symbol(first + 1))
        self.runtime.after_backward(each)

    def _send(self, each: Pass) -> None:
        """Some of what it holds is in CPU RAM."""
        key = each.stage, each.micro_batch
        self.ledger.free(self.parked.pop(key))
        self.parked[key] = self.ledger.allocate(symbol(self.sizes[each.stage] + 2))


_Lines = tuple[tuple[tuple[ComponentKind | None, str], int], ...]


class _Sum(Ledger):
    """A ledger of nothing but sums: of all, and by purpose."""

    __slots__ = ("blocks", "lines", "total", "watch")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.lines: dict[tuple[ComponentKind | None, str], int] = {}
        self.blocks: list[tuple[int, tuple[ComponentKind | None, str]]] = []
        self.watch: Callable[[], object] | None = None
        """Called when something has been asked for."""

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,  # noqa: ARG002
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block."""
        line = kind, "" if name is None else str(name)
        self.total += num_bytes
        self.lines[line] = self.lines.get(line, 0) + num_bytes
        self.blocks.append((num_bytes, line))
        if self.watch is not None:
            self.watch()
        return len(self.blocks) - 1

    def free(self, block: Block) -> None:
        """Give it back."""
        num_bytes, line = self.blocks[block]
        self.total -= num_bytes
        self.lines[line] -= num_bytes

    def free_all(self, blocks: Iterable[Block]) -> None:
        """Give them back."""
        for block in blocks:
            self.free(block)
