"""A run added up: the ledger that keeps sums, and who leads it from spot to spot of the passes.

A ``Tally`` is the ledger that an engine's program writes its own blocks into; it notes the most that
the program holds at each spot. What a program holds does not depend on how large the model's activations
are, so one ``Outline`` of a run serves every batch.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from weakref import ref

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.memory.account import ComponentKind
from memplan.memory.outline import NO_CROWD, Held, Line, Outline, Point, Visits
from memplan.memory.passes import BackwardPass, ForwardPass, StepPasses
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.memory.spots import PassSpots, Spot, Spots
from memplan.memory.stops import TurningEngine
from memplan.training.splitting.exchange import ALONE, Exchange, ExchangeKind, Hiding, Ranks, Visit

_ROUND = ALLOCATION_ROUNDING - 1
"""The bits of a block that its size leaves: they say its line."""
_Exchanged = tuple[int, ExchangeKind, int, Ranks, Hiding]
"""The fields of an ``Exchange``, of which one is made where they are told."""
NOTED = 3
"""Of a run of layers in which an engine does the same, how many are looked at, at either end."""


class Tally(Ledger):
    """A ledger that keeps sums: of what a program holds, by purpose, at every spot of the passes."""

    __slots__ = (
        "_aside_of", "_exchanged", "_group", "_held", "_lines", "_looked", "_most", "_most_held", "_next", "_number", "_part",
        "_points", "_repetition",
        "_snapshot", "_spot", "_steady", "_stops", "_total", "_weight_lines", "outline", "place", "spots",
    )  # fmt: skip

    def __init__(self, spots: Spots) -> None:
        super().__init__()
        self.spots = spots
        """Where the program's engine may find the model."""
        self.outline = Outline()
        self._lines: dict[ComponentKind | None, dict[object, int]] = {}
        self._weight_lines: dict[ComponentKind | None, int] = {}
        self._held: list[int] = []
        self._total = 0
        """What the program holds."""
        self._snapshot: Held | None = None
        """By line, until something changes."""
        self._part = self._aside_of = Part.LOAD
        self._points: dict[Spot, list[Point]] = {}
        """Of the present visit to a part."""
        self._looked = self._points
        """The same, while nothing is noted."""
        self._group: int | None = NO_CROWD
        """Of what is beside the present visit; None: it is not looked at."""
        self._spot = 0
        self._repetition = 0
        self._most = 0
        self._most_held: Held = ()
        self.place = -1
        """The segment that is run."""
        self._exchanged: list[_Exchanged] = []
        self._steady = False
        """The first step is over."""
        self._number = self._next = -1
        """Of a pipeline's passes the one at hand, and the next one."""

    # -- what programs ask for ---------------------------------------------------------------------

    def enter(self, part: Part, step: int = 0) -> None:  # noqa: ARG002
        """A part of the run begins, or goes on in another micro-batch."""
        self._leave()
        self._close_visit()
        self.outline.held[self._part] = self._now()
        self._end_exchanges()
        self._part = part
        self._most, self._most_held = -1, ()

    def beside(self, group: int | None) -> None:
        """What follows has one of a group of crowds beside it; None: it is no fuller than what has."""
        self._leave()
        self._close_visit()
        self._most, self._most_held = -1, ()
        self._group = group

    @property
    def is_noting(self) -> bool:
        """Whether what comes is looked at."""
        return self._group is not None

    @property
    def shares_formats(self) -> bool:
        """fp16 and bf16 take the same bytes."""
        return True

    def standing(self) -> object:
        """By line: what is done once more from the same changes nothing."""
        return self._now()

    def begin_aside(self, part: Part) -> None:
        """It is noted under a part of its own."""
        self._aside_of = self._part
        self.enter(part)

    def end_aside(self) -> None:
        """Back to the part before."""
        self.enter(self._aside_of)

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,  # noqa: ARG002
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block of some purpose."""
        size = (num_bytes + _ROUND) & ~_ROUND
        try:
            line = self._lines[kind][name] if name.__class__ is str else self._weight_lines[kind]
        except KeyError:
            line = self._line(kind or ComponentKind.TEMPORARIES, name)
        self._held[line] += size
        self._total += size
        self._snapshot = None
        return size | line

    def allocate_all(self, sizes: Sequence[tuple[int, object]], kind: ComponentKind) -> list[Block]:
        """Ask for blocks of these sizes, each with its name; single weights' share a line."""
        if not sizes or any(name.__class__ is str for _, name in sizes):
            return [self.allocate(size, 0, kind, name) for size, name in sizes]
        line = self._weight_lines.get(kind)
        if line is None:
            line = self._line(kind, sizes[0][1])
        kept = [(size + _ROUND) & ~_ROUND for size, _ in sizes]
        added = sum(kept)
        self._held[line] += added
        self._total += added
        self._snapshot = None
        return [size | line for size in kept]

    def _line(self, kind: ComponentKind, name: object) -> int:
        """A new line of a purpose; blocks of single weights share their kind's."""
        line = len(self._held)
        assert line < ALLOCATION_ROUNDING, "lines are written into what rounding leaves of a size"
        self._held.append(0)
        if isinstance(name, str):
            self._lines.setdefault(kind, {})[name] = line
            self.outline.lines.append(Line(kind, name))
        else:
            self._weight_lines[kind] = line
            self.outline.lines.append(Line(kind, ""))
        return line

    def move(self, block: Block, stream: int) -> None:
        """Streams make no difference to a sum."""

    def free(self, block: Block) -> None:
        """Give a block back."""
        held, total = self._held, self._total
        if total > self._most:
            snapshot = self._snapshot
            self._most = total
            self._most_held = tuple(held) if snapshot is None else snapshot
        line = block & _ROUND
        size = block - line
        held[line] -= size
        self._total = total - size
        self._snapshot = None

    def free_all(self, blocks: Iterable[Block]) -> None:
        """Give blocks back; between two of them nothing rises."""
        if self._total > self._most:
            self._most, self._most_held = self._total, self._now()
        held = self._held
        for block in blocks:
            line = block & _ROUND
            held[line] -= block - line
            self._total -= block - line
        self._snapshot = None

    def use_in_turn(
        self,
        sizes: Iterable[int],
        *,
        stream: int = 0,
        kind: ComponentKind,
        name: object,
        left_bytes: int = 0,
    ) -> list[Block]:
        """Blocks of these sizes, one after another: no moment is fuller than that of the largest with what is left by then."""
        fullest = left = 0
        for size in sizes:
            left += left_bytes
            fullest = max(fullest, size + left)
        self.use(fullest, stream=stream, kind=kind, name=name)
        return [self.allocate(left, stream, kind, name)] if left else []

    def empty_cache(self) -> None:
        """What is alive stays."""

    def exchange(
        self,
        kind: ExchangeKind,
        num_bytes: int,
        ranks: Ranks = ALONE,
        hiding: Hiding = Hiding.NONE,
    ) -> None:
        """Note it with the segment that is run."""
        if not num_bytes or not self._steady:
            return
        self._exchanged.append((self.place, kind, num_bytes, ranks, hiding))

    def _end_exchanges(self) -> None:
        if self._steady:
            counted = Counter(self._exchanged)
            found = tuple((Exchange(*each), count) for each, count in counted.items())
            self.outline.visits.append(Visit(self._part.value, found, self._number))
        self._exchanged = []
        self._number, self._next = self._next, -1
        self.place = -1

    @property
    def num_exchanged(self) -> int:
        """How much was noted of the present part."""
        return len(self._exchanged)

    def exchange_again(self, first: int, times: int) -> None:
        """What was noted from there on is exchanged so many times more."""
        self._exchanged += self._exchanged[first:] * times

    def begin_pass(self, number: int) -> None:
        """What is exchanged from where it is entered on is of this pass."""
        self._next = number

    # -- where the model is ------------------------------------------------------------------------

    def _now(self) -> Held:
        if self._snapshot is None:
            self._snapshot = tuple(self._held)
        return self._snapshot

    def stand(self, spot: Spot, repetition: int = 0) -> None:
        """The model stays at a spot while its engine acts."""
        # What is still held counts with the rise that follows.
        if self._most > self._total:
            self._add(self._spot, self._repetition, self._most, self._most_held)
        self._spot, self._repetition = spot, repetition
        self._most = -1

    def look_away(self) -> None:
        """The model goes on to spots that need not be noted."""
        self.stand(self._spot, self._repetition)
        self._looked, self._points = self._points, {}

    def look_again(self) -> None:
        """From the next spot on they are."""
        self._points = self._looked
        self._most = -1

    def rest(self, spot: Spot) -> None:
        """It stays at a spot from which it need not rise."""
        self.stand(spot)
        self._leave()
        self._most = -1

    def _leave(self) -> None:
        if self._total > self._most:
            self._most, self._most_held = self._total, self._now()
        self._add(self._spot, self._repetition, self._most, self._most_held)

    def rise(self, peak: Spot, end: Spot, repetition: int) -> None:
        """It rises to one spot and goes on at once to another, where it stays."""
        held, total = self._snapshot, self._total
        if held is None:
            held = self._snapshot = tuple(self._held)
        points = self._points.get(peak)
        if points is None:
            self._points[peak] = [(repetition, total, held)]
        elif (
            len(points) > 1
            and points[-1][1] == total == points[-2][1]
            and points[-2][0]
            and points[-1][0] != repetition
        ):
            points[-1] = repetition, total, held
        else:
            _keep(points, (repetition, total, held))
        if self._most > total:
            self._add(self._spot, self._repetition, self._most, self._most_held)
        self._spot, self._repetition = end, repetition
        self._most = -1

    def _add(self, spot: Spot, repetition: int, total: int, held: Held) -> None:
        """Keep a point if, for some slope of the model's own bytes, none of its spot is higher."""
        points = self._points.get(spot)
        if points is None:
            self._points[spot] = [(repetition, total, held)]
        else:
            _keep(points, (repetition, total, held))

    def _close_visit(self) -> None:
        """Take what a micro-batch, or a part of one, has shown into account."""
        points, self._points = self._points, {}
        if self._group is None or not points:
            return
        visits = self.outline.points.setdefault(self._part, [])
        _note(visits, self._group, points)

    def end_first_step(self) -> None:
        """What came after loading was no steady step: it is kept apart."""
        self._leave()
        self._close_visit()
        points = self.outline.points
        points.pop(Part.OVERFLOW, None)
        first: list[Visits] = []
        for part in (Part.GENERATION, Part.FORWARD, Part.BACKWARD, Part.STEP):
            for each in points.pop(part, []):
                _merge(first, each)
        points[Part.FIRST_STEP] = first
        self._part, self._points = Part.FORWARD, {}
        self._most, self._most_held = -1, ()
        self._steady = True

    def close(self, weight_words: Mapping[ComponentKind, str]) -> Outline:
        """The run is over; the words say what blocks of single weights are."""
        self._leave()
        lines = self.outline.lines
        for number, line in enumerate(lines):
            if not line.name:
                lines[number] = Line(line.kind, weight_words.get(line.kind, ""))
        self._close_visit()
        self.outline.held[self._part] = self._now()
        for visits in self.outline.points.values():
            for each in visits:
                each.close()
        return self.outline


def _keep(points: list[Point], point: Point) -> None:
    """Add a spot's next point, and leave out those that are then never the highest."""
    repetition, total, _ = point
    middle, between, _ = points[-1]
    if middle == repetition:
        # Another act at the same spot.
        if total <= between:
            return
        points.pop()
        if not points:
            points.append(point)
            return
        middle, between, _ = points[-1]
    while len(points) > 1:
        start, first, _ = points[-2]
        if first == between == total and start:
            # On one line with those two, as mostly: no earlier one is nearer to it than it was.
            points[-1] = point
            return
        # The first repetition may begin lower than the line of all others.
        if not start or (between - first) * (repetition - start) > (total - first) * (
            middle - start
        ):
            break
        points.pop()
        middle, between, _ = points[-1]
    points.append(point)


def _note(visits: list[Visits], group: int, points: dict[Spot, list[Point]]) -> None:
    """Of a run without crowds all visits are one; else those that are the same share their points."""
    for each in visits:
        if group == NO_CROWD and NO_CROWD in each.groups:
            found = each.points
            for spot, own in points.items():
                before = found.get(spot)
                if before is None:
                    found[spot] = own
                elif not _covers(before, own):
                    found[spot] = before + own
            return
        if each.points == points and NO_CROWD not in each.groups:
            each.groups.add(group)
            return
    visits.append(Visits({group}, points))


def _merge(visits: list[Visits], other: Visits) -> None:
    """Visits to another part, with the same beside them."""
    for each in visits:
        if each.groups == other.groups:
            for spot, own in other.points.items():
                each.points.setdefault(spot, []).extend(own)
            return
    visits.append(other)


def _covers(before: list[Point], points: list[Point]) -> bool:
    """Whether points of an earlier visit are as high at the same repetitions."""
    return len(before) == len(points) and all(
        early[0] == late[0] and early[1] >= late[1]
        for early, late in zip(before, points, strict=True)
    )


class Turns:
    """Repetitions of a pass in which an engine does the same in turn: all but the first and the last of them are passed
    over, since between two spots of one height no other is higher."""

    def __init__(
        self, engine: TurningEngine, ledger: Tally, segment: Segment, count: int, way: int
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._segment = segment
        self._count = count
        self._way = way
        """Whether the number of a copy goes up or down."""
        self._held: set[object] = set()
        """What was held by line: only where that comes back the engine is asked how it stands."""
        self._seen: dict[Hashable, tuple[int, int]] = {}
        """How it stood, at which repetition, and how much had been exchanged."""
        self._over_until = 0
        self._is_asked = count > NOTED

    def are_over(self, repetition: int, copy: int) -> bool:
        """Whether this repetition is as one before it and one behind it, which are looked at."""
        if self._is_asked:
            self._ask(repetition, copy)
        return repetition < self._over_until

    def _ask(self, repetition: int, copy: int) -> None:
        ledger, held = self._ledger, self._ledger.standing()
        if held not in self._held:
            self._held.add(held)
            return
        standing = self._engine.standing_at(self._segment, copy)
        if standing is None:
            self._is_asked = False
            return
        seen = standing, held
        before, exchanged = self._seen.setdefault(seen, (repetition, ledger.num_exchanged))
        if before == repetition:
            return
        turn = repetition - before
        # The last one is looked at, too.
        most = max(0, (self._count - repetition) // turn - 1)
        times = self._engine.skip_turns(self._segment, copy, self._way * turn, most)
        ledger.exchange_again(exchanged, times)
        self._over_until = repetition + times * turn
        self._is_asked = False


class TallyPlayback:
    """Forward and backward of one micro-batch, from spot to spot."""

    def __init__(
        self, tape: Tape, passes: StepPasses, ledger: Tally, engine: TurningEngine
    ) -> None:
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.spots = ledger.spots.of(passes)
        self._engine = ref(engine)
        """It has the playback: neither may keep the other."""
        self.uses = self.spots.uses
        self.workspaces = {True: 0, False: 0}
        """Counted apart from what a run holds."""
        self.at = self.spots.between
        """Where the present micro-batch is when a pass is over."""
        self.parked: dict[int, Spot] = {}
        """Where micro-batches are whose next pass is to come. What they hold is beside the others' passes
        (``Tally.beside``)."""
        self.waiting: dict[tuple[Parameter, int], tuple[int, Block]] = {}
        """Gradients of weights used more than once: how many are to come, and the sum so far."""

    @property
    def engine(self) -> TurningEngine:
        """Who takes part in the passes; it is there as long as it runs one."""
        engine = self._engine()
        assert engine is not None
        return engine

    def need_workspace(self, *, forward: bool) -> None:
        """cuBLAS's workspaces are counted apart from what a run holds."""

    def fetch_batch(self) -> None:
        """Its size is the batch's own."""

    def forward(self) -> None:
        """Every segment's forward pass."""
        spots, engine = self.spots, self.engine
        returned_at, joined_at = self.tape.returned_at, self.tape.joined_at
        for each, own in zip(self.passes.forward, spots.forward, strict=True):
            if not each.first and each.segment.index in (returned_at, joined_at):
                self.ledger.stand(own.start)
                if each.segment.index == returned_at:
                    engine.end_forward()
                if each.segment.index == joined_at:
                    engine.run_joined()
            self._forward(engine, each, own)
        self.ledger.rest(spots.at_return)
        if returned_at is None:
            engine.end_forward()

    def return_loss(self) -> None:
        """The model has returned: its outputs but the loss go, and casts."""
        self.at = self.spots.after_forward
        self.ledger.rest(self.at)

    def pass_over_forward(self) -> None:
        """Be where a forward pass ends, without walking there."""
        self.at = self.spots.after_forward

    def pass_over_inputs(self) -> None:
        """The same of the backward pass for a stage's input."""
        self.at = self.spots.after_inputs

    def park(self, micro_batch: int) -> None:
        """Another pass is to run before this micro-batch's backward one: it is held as it is."""
        self.ledger.stand(self.spots.between)
        self.parked[micro_batch] = self.at

    def resume(self, micro_batch: int) -> None:
        """Go on with it."""
        self.at = self.parked.pop(micro_batch)
        self.ledger.stand(self.at)

    def send(self, micro_batch: int, num_bytes: int, least_bytes: int) -> None:
        """What is in CPU RAM is none of what is beside other passes."""

    def _forward(self, engine: TurningEngine, each: ForwardPass, own: PassSpots) -> None:
        segment, ledger = each.segment, self.ledger
        (pieces,) = own.stretches
        ledger.place = segment.index
        was_noted = True
        is_even = engine.is_even
        turns = Turns(engine, ledger, segment, each.repeats, 1)
        for repetition in range(each.repeats):
            if not is_even and turns.are_over(repetition, each.first + repetition):
                continue
            is_noted = not is_even or _is_at_an_end(repetition, each.repeats)
            if was_noted and not is_noted:
                ledger.look_away()
            elif is_noted and not was_noted:
                ledger.look_again()
            was_noted = is_noted
            if is_noted:
                ledger.stand(own.start, repetition)
            copy = each.first + repetition
            engine.before_forward(segment, copy)
            if is_noted:
                for peak, end, acts in pieces:
                    ledger.rise(peak, end, repetition)
                    if acts:
                        engine.reach(segment, copy, acts)
            engine.renew(segment)
            engine.after_forward(segment, copy)

    def backward(self) -> None:
        """Every segment's backward pass, the last one first."""
        spots, engine = self.spots, self.engine
        remaining = {segment.index: segment.repeat for segment in self.tape.segments}
        finished: list[tuple[tuple[Parameter, int], Block]] = []
        self.finished = finished if engine.takes_all_at_once else None
        for each, own in zip(self.passes.backward, spots.backward, strict=True):
            index = each.segment.index
            turns = Turns(engine, self.ledger, each.segment, each.repeats, -1)
            for repetition in range(each.repeats):
                remaining[index] -= 1
                if not engine.is_even and turns.are_over(repetition, remaining[index]):
                    continue
                self._backward(engine, each, own, repetition, remaining[index])
        for weight, block in finished:
            engine.gradient_ready(weight, block)
        self.ledger.rest(spots.after_backward)

    def backward_inputs(self) -> None:
        """The backward pass of a pipeline's stage for its input's gradient alone."""
        engine = self.engine
        for each, own in zip(self.passes.inputs, self.spots.inputs, strict=True):
            for repetition in range(each.repeats):
                self._backward(engine, each, own, repetition, each.repeats - 1 - repetition)
        self.at = self.spots.after_inputs
        self.ledger.rest(self.at)

    def backward_weights(self) -> None:
        """The one for the weights' gradients."""
        engine, self.finished = self.engine, None
        for each, own in zip(self.passes.weights, self.spots.weights, strict=True):
            for repetition in range(each.repeats):
                self._backward(engine, each, own, repetition, repetition)
        self.ledger.rest(self.spots.after_weights)

    def let_go(self) -> None:
        """The loss goes, and with it all that is left of the model's."""
        self.ledger.rest(self.spots.between)

    def hand_outputs_over(self, name: str) -> Block:
        """The model's outputs, which somebody else holds from here on; everything else goes."""
        self.let_go()
        size = self.tape.outputs_bytes
        return self.ledger.allocate(size, 0, ComponentKind.LOGITS_AND_LOSS, name)

    def _backward(
        self, engine: TurningEngine, each: BackwardPass, own: PassSpots, repetition: int, copy: int
    ) -> None:
        segment, ledger = each.segment, self.ledger
        ledger.place = segment.index
        is_noted = True
        if engine.is_even:
            is_noted = _is_at_an_end(repetition, each.repeats)
            if is_noted is not _is_at_an_end(max(0, repetition - 1), each.repeats):
                (ledger.look_again if is_noted else ledger.look_away)()
        if is_noted:
            ledger.stand(own.start, repetition)
        engine.before_backward(segment, copy)
        rise = ledger.rise
        for handed, pieces in zip(own.gradients, own.stretches, strict=True):
            if is_noted:
                for peak, end, acts in pieces:
                    rise(peak, end, repetition)
                    if acts:
                        engine.reach(segment, copy, acts)
            if handed is not None:
                parameter, is_own, num_bytes = handed
                self._gradient(engine, (parameter, copy if is_own else 0), num_bytes)
        if own.end is not None and repetition == each.repeats - 1:
            ledger.stand(own.end, repetition)
        engine.after_backward(segment, copy)

    def _gradient(
        self, engine: TurningEngine, weight: tuple[Parameter, int], num_bytes: int | None
    ) -> None:
        """Hand a gradient over once autograd has added all of it up (``Playback._gradient``)."""
        ledger, block = self.ledger, None
        if num_bytes is not None:
            block = ledger.allocate(num_bytes, 0, ComponentKind.GRADIENTS, weight)
        if weight[0] in self.uses:
            left, present = self.waiting.pop(weight, (self.uses[weight[0]], None))
            if present is not None and block is not None:
                ledger.free(present)
            present = present if block is None else block
            assert present is not None
            if left > 1:
                self.waiting[weight] = left - 1, present
                return
            block = present
        assert block is not None
        if self.finished is not None:
            self.finished.append((weight, block))
        else:
            engine.gradient_ready(weight, block)


def _is_at_an_end(repetition: int, count: int) -> bool:
    """Of repetitions in which an engine does the same the first and the last ones tell all."""
    return repetition < NOTED or repetition >= count - NOTED
