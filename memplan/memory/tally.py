"""What is alive over a run, by component, without playing every block out.

The walks know how high the model's own allocations rise above the level at which a repetition of a
segment begins, so between two acts of an engine there is one number to look at. A ``Tally`` is the
ledger that an engine's program writes its own blocks into. ``TallyPlayback`` leads it from spot to spot
of the passes, and it notes the most that the program holds at each.

What a program holds does not depend on how large the model's activations are, so one ``Outline`` of a run
serves every batch: it is laid over the passes, and the fullest spot of every part is found by arithmetic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from memplan.fast_dataclass import dataclass
from memplan.graph.segments import Segment
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, Storage
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.ledger import Block, Ledger, Part
from memplan.memory.playback import Acts, Cut, Engine, Stops, backward_cuts, forward_cuts
from memplan.memory.step import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.walk import WORKSPACE, Event, GradientBuffer, Interval, Level

Piece = tuple[Level, Level, Acts]
"""Events between two stops: the highest level, the one at the end, and what is done there."""
Held = tuple[int, ...]
"""What a program holds, by line."""
Point = tuple[int, int, Held]
"""A repetition, what the program holds in all, and by line."""
Spot = int
"""A level of a pass: its number in ``Spots.levels``."""
_NOTHING = Level()
NOTED = 3
"""Of a run of layers in which an engine does the same, how many are looked at, at either end."""


@dataclass(frozen=True, slots=True)
class Line:
    """Blocks of one purpose."""

    kind: ComponentKind
    name: str


Pass = ForwardPass | BackwardPass


class Spots:
    """Where an engine may find the model: levels of all passes, in an order that every batch shares."""

    def __init__(self, passes: StepPasses, stops: "StopsBySegment") -> None:
        self.passes = passes
        self.levels: list[tuple[Pass | None, Level | Height]] = []
        """A level above where a repetition of a pass begins, or the model's height between passes."""
        self.between = self._add(None, Height())
        """Between steps, where the model holds nothing."""
        self.at_return = self._add(None, passes.at_return)
        self.after_forward = self._add(None, passes.after_forward)
        self.after_backward = self._add(None, passes.after_backward)
        self.forward = [self._forward(each, stops) for each in passes.forward]
        self.backward = [self._backward(each, stops) for each in passes.backward]

    def _add(self, each: Pass | None, level: Level | Height) -> Spot:
        self.levels.append((each, level))
        return len(self.levels) - 1

    def _pairs(self, each: Pass, pieces: Sequence[Piece]) -> "list[Stretch]":
        return [(self._add(each, peak), self._add(each, end), acts) for peak, end, acts in pieces]

    def _forward(self, each: ForwardPass, stops: "StopsBySegment") -> "PassSpots":
        own = stops.get(each.segment.index)
        pieces: list[Piece] = [(each.peak, each.profile.end, ())]
        if own is not None:
            cuts = forward_cuts(each, own)
            pieces = Folding(each.segment).pieces(each.profile.events, cuts)
        start = self._add(each, _NOTHING)
        return PassSpots(start=start, stretches=[self._pairs(each, pieces)], end=None)

    def _backward(self, each: BackwardPass, stops: "StopsBySegment") -> "PassSpots":
        own = stops.get(each.segment.index)
        start = self._add(each, _NOTHING)
        stretches = [
            self._pairs(each, pieces)
            for pieces in (
                [[(interval.peak, interval.end, ())] for interval in each.intervals]
                if own is None
                else _cut_intervals(each, own)
            )
        ]
        end = None
        if each.released_bytes:
            last = each.profile.end
            earlier = last.earlier_bytes - each.released_bytes
            end = self._add(each, replace(last, earlier_bytes=earlier))
        return PassSpots(start=start, stretches=stretches, end=end)

    def height(self, spot: Spot, repetition: int) -> Height:
        """What the model holds, by component."""
        each, level = self.levels[spot]
        if isinstance(level, Height):
            return level
        assert each is not None
        return each.start_of(repetition).plus(level, loss=each.loss)

    @cached_property
    def lines(self) -> list[tuple[int, int, int]]:
        """What the model holds at each spot, as a straight line in the repetition: in the first, and in
        all later ones the intercept and the slope [bytes]."""
        return [_line(each, level) for each, level in self.levels]


def _line(each: Pass | None, level: Level | Height) -> tuple[int, int, int]:
    if each is None:
        return level.total_bytes, level.total_bytes, 0
    base = each.start.total_bytes + level.total_bytes
    if isinstance(each, ForwardPass):
        return base, base + each.first_bytes - each.later_bytes, each.later_bytes
    return base, base, each.change.total_bytes


Stretch = tuple[Spot, Spot, Acts]
"""Its highest level, the one at its end, and what is done there."""
StopsBySegment = Mapping[int, Stops | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSpots:
    """The spots of one repetition of a pass."""

    start: Spot
    stretches: list[list[Stretch]]
    """For each interval of a backward pass; one list for a forward pass."""
    end: Spot | None
    """After the last repetition, where it lets more go than others do."""


def _cut_intervals(each: BackwardPass, stops: Stops) -> list[list[Piece]]:
    folding = Folding(each.segment)
    found: list[list[Piece]] = []
    for interval, cuts in zip(each.intervals, backward_cuts(each, stops), strict=True):
        pieces = folding.pieces(interval.events, cuts)
        folding.hand_over(interval)
        pieces[-1] = (pieces[-1][0], interval.end, ())
        found.append(pieces)
    return found


class Folding:
    """Levels of a walk's events between stops that are not the walk's own."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.kept = {storage for each in segment.operations for storage in each.saved}
        if segment.checkpointed and segment.input is not None:
            self.kept.add(segment.input.storage)
        self.sizes: dict[object, int] = {}
        self.total = self.saved = self.earlier = 0

    def pieces(self, events: list[Event], cuts: Sequence[Cut]) -> list[Piece]:
        """Up to each cut, and the rest."""
        found: list[Piece] = []
        done = 0
        for position, acts in cuts:
            found.append(self._piece(events[done:position], acts))
            done = position
        found.append(self._piece(events[done:], ()))
        return found

    def _piece(self, events: list[Event], acts: Acts) -> Piece:
        highest = self._level()
        highest_bytes = self.total
        for key, size in events:
            if size:
                self.sizes[key] = size
                self._change(key, size)
                if self.total > highest_bytes:
                    highest, highest_bytes = self._level(), self.total
            elif key is not WORKSPACE:
                self._change(key, -self._size(key))
        return highest, self._level(), acts

    def _level(self) -> Level:
        return Level(
            saved_bytes=self.saved,
            other_bytes=self.total - self.saved - self.earlier,
            earlier_bytes=self.earlier,
        )

    def _size(self, key: object) -> int:
        size = self.sizes.pop(key, None)
        if size is None:
            assert isinstance(key, Storage | GradientBuffer)
            size = key.num_bytes
        return size

    def _change(self, key: object, size: int) -> None:
        self.total += size
        if isinstance(key, Storage) and key in self.kept:
            if key.segment == self.segment.index:
                self.saved += size
            else:
                self.earlier += size

    def hand_over(self, interval: Interval) -> None:
        """The gradient that ends an interval is its engine's now."""
        if interval.gradient is not None:
            self._change(interval.gradient, -self._size(interval.gradient))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The fullest moment of a part of a run."""

    total_bytes: int
    held: Held
    """By line, what the program holds."""
    spot: Spot
    repetition: int


class Outline:
    """What a program holds over a run, spot by spot; every batch of the same structure shares it."""

    def __init__(self, lines: list[Line], stops: StopsBySegment) -> None:
        self.lines = lines
        self.stops = stops
        self.points: dict[Part, dict[Spot, list[Point]]] = {}
        """The points that may be the fullest of their spot, whatever the model holds there."""
        self.held: dict[Part, Held] = {}
        """What is held when a part of the run ends."""

    @property
    def is_cut(self) -> bool:
        """Whether the engine takes part within segments."""
        return any(stops is not None for stops in self.stops.values())

    @property
    def held_bytes(self) -> int:
        """What the program holds between steps."""
        return sum(self.held[Part.STEP])

    def moments(self, spots: Spots) -> dict[Part, Moment]:
        """The fullest of each part."""
        return {part: _fullest(found, spots) for part, found in self.points.items()}

    def entries(self, held: Held) -> list[Entry]:
        """What the program holds, by purpose."""
        return [
            Entry(line.kind, size, line.name) for line, size in zip(self.lines, held, strict=False)
        ]


def _fullest(points: dict[Spot, list[Point]], spots: Spots) -> Moment:
    lines = spots.lines
    best = -1
    found: tuple[Held, Spot, int] | None = None
    for spot, own in points.items():
        first, intercept, slope = lines[spot]
        for repetition, size, held in own:
            total = size + (intercept + repetition * slope if repetition else first)
            if total > best:
                best, found = total, (held, spot, repetition)
    assert found is not None
    held, spot, repetition = found
    return Moment(total_bytes=best, held=held, spot=spot, repetition=repetition)


class Tally(Ledger):
    """A ledger that keeps sums: of what a program holds, by purpose, at every spot of the passes."""

    __slots__ = (
        "_held", "_line_of", "_lines", "_most", "_most_held", "_part", "_points", "_repetition",
        "_sizes", "_snapshot", "_spot", "_stops", "_total", "outline",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.outline = Outline([], {})
        self._lines: dict[object, int] = {}
        self._sizes: list[int] = []
        self._line_of: list[int] = []
        self._held: list[int] = []
        self._total = 0
        """What the program holds."""
        self._snapshot: Held | None = None
        """By line, until something changes."""
        self._part = Part.LOAD
        self._points: dict[Spot, list[Point]] = {}
        self._spot = 0
        self._repetition = 0
        self._most = 0
        self._most_held: Held = ()

    # -- what programs ask for ---------------------------------------------------------------------

    def playback(
        self,
        tape: Tape,
        passes: StepPasses,
        engine: Engine,
        *,
        workspace_bytes: int,  # noqa: ARG002
    ) -> "TallyPlayback":
        """Who leads it from spot to spot."""
        return TallyPlayback(tape, passes, self, engine)

    def enter(self, part: Part, step: int = 0) -> None:  # noqa: ARG002
        """A part of the run begins, or goes on in another micro-batch."""
        self._leave()
        self.outline.held[self._part] = self._now()
        self._part = part
        self._points = self.outline.points.setdefault(part, {})
        self._most, self._most_held = -1, ()

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,  # noqa: ARG002
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block of some purpose."""
        size = -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
        key = name if name.__class__ is str else kind
        line = self._lines.get(key)
        if line is None or self.outline.lines[line].kind is not kind:
            line = self._line(kind or ComponentKind.TEMPORARIES, key)
        self._held[line] += size
        self._total += size
        self._snapshot = None
        self._line_of.append(line)
        self._sizes.append(size)
        return len(self._sizes) - 1

    def allocate_all(self, sizes: Sequence[tuple[int, object]], kind: ComponentKind) -> list[Block]:
        """Ask for blocks of these sizes, each with its name."""
        lines, held, first = self._lines, self._held, len(self._sizes)
        for num_bytes, name in sizes:
            size = -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
            key = name if name.__class__ is str else kind
            line = lines.get(key)
            if line is None or self.outline.lines[line].kind is not kind:
                line = self._line(kind, key)
            held[line] += size
            self._total += size
            self._line_of.append(line)
            self._sizes.append(size)
        self._snapshot = None
        return list(range(first, len(self._sizes)))

    def _line(self, kind: ComponentKind, key: object) -> int:
        """The line of a purpose; blocks of single weights share their kind's."""
        line = self._lines.get((kind, key))
        if line is None:
            line = self._lines[kind, key] = len(self._held)
            self._held.append(0)
            self.outline.lines.append(Line(kind, key if isinstance(key, str) else ""))
        self._lines.setdefault(key, line)
        return line

    def move(self, block: Block, stream: int) -> None:
        """Streams make no difference to a sum."""

    def free(self, block: Block) -> None:
        """Give a block back."""
        if self._total > self._most:
            self._most, self._most_held = self._total, self._now()
        size = self._sizes[block]
        self._held[self._line_of[block]] -= size
        self._total -= size
        self._snapshot = None

    def free_all(self, blocks: Iterable[Block]) -> None:
        """Give blocks back; between two of them nothing rises."""
        if self._total > self._most:
            self._most, self._most_held = self._total, self._now()
        held, sizes, line_of = self._held, self._sizes, self._line_of
        for block in blocks:
            size = sizes[block]
            held[line_of[block]] -= size
            self._total -= size
        self._snapshot = None

    def empty_cache(self) -> None:
        """What is alive stays."""

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
        self._points = {}

    def look_again(self) -> None:
        """From the next spot on they are."""
        self._points = self.outline.points[self._part]
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

    def rise(self, spot: Spot, repetition: int) -> None:
        """It rises to a spot and goes on at once."""
        held = self._snapshot
        if held is None:
            held = self._snapshot = tuple(self._held)
        self._add(spot, repetition, self._total, held)

    def _add(self, spot: Spot, repetition: int, total: int, held: Held) -> None:
        """Keep a point if, for some slope of the model's own bytes, none of its spot is higher."""
        points = self._points.get(spot)
        point = (repetition, total, held)
        if points is None:
            self._points[spot] = [point]
            return
        middle, between, _ = points[-1]
        if middle >= repetition:
            # Another micro-batch, or another act at the same spot.
            self._add_again(points, point)
            return
        while len(points) > 1:
            start, first, _ = points[-2]
            # The first repetition may begin lower than the line of all others.
            if not start or (between - first) * (repetition - start) > (total - first) * (
                middle - start
            ):
                break
            points.pop()
            middle, between, _ = points[-1]
        points.append(point)

    def _add_again(self, points: list[Point], point: Point) -> None:
        for number, (repetition, total, _) in enumerate(points):
            if repetition == point[0]:
                if point[1] > total:
                    points[number] = point
                return
        points.append(point)
        points.sort(key=lambda each: each[0])

    def forget_steps(self) -> None:
        """What came before was no steady step: only loading is kept."""
        self._leave()
        self.outline.points = {Part.LOAD: self.outline.points[Part.LOAD]}
        self._part, self._points = Part.FORWARD, {}
        self._most, self._most_held = -1, ()

    def close(self, weight_words: Mapping[ComponentKind, str]) -> Outline:
        """The run is over; the words say what blocks of single weights are."""
        self._leave()
        lines = self.outline.lines
        for number, line in enumerate(lines):
            if not line.name:
                lines[number] = Line(line.kind, weight_words.get(line.kind, ""))
        self.outline.held[self._part] = self._now()
        return self.outline


class TallyPlayback:
    """Forward and backward of one micro-batch, from spot to spot."""

    def __init__(self, tape: Tape, passes: StepPasses, ledger: Tally, engine: Engine) -> None:
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.engine = engine
        self.uses = repeated_uses(passes)
        self.waiting: dict[tuple[Parameter, int], tuple[int, Block]] = {}
        """Gradients of weights used more than once: how many are to come, and the sum so far."""

    @cached_property
    def spots(self) -> Spots:
        """Cut where the engine takes part."""
        stops = {segment.index: self.engine.stops(segment) for segment in self.tape.segments}
        self.ledger.outline.stops = stops
        return Spots(self.passes, stops)

    def fetch_batch(self) -> None:
        """Its size is the batch's own."""

    def forward(self) -> None:
        """Every segment's forward pass."""
        spots = self.spots
        for each, own in zip(self.passes.forward, spots.forward, strict=True):
            self._forward(each, own)
        self.ledger.rest(spots.at_return)

    def return_loss(self) -> None:
        """The model has returned: its outputs but the loss go, and casts."""
        self.ledger.rest(self.spots.after_forward)

    def _forward(self, each: ForwardPass, own: PassSpots) -> None:
        segment, ledger, engine = each.segment, self.ledger, self.engine
        (pieces,) = own.stretches
        for repetition in range(segment.repeat):
            is_noted = self._is_noted(repetition, segment.repeat)
            if repetition == NOTED and not is_noted:
                ledger.look_away()
            elif repetition == segment.repeat - NOTED:
                ledger.look_again()
            if is_noted:
                ledger.stand(own.start, repetition)
            engine.before_forward(segment, repetition)
            if is_noted:
                for peak, end, acts in pieces:
                    ledger.rise(peak, repetition)
                    ledger.stand(end, repetition)
                    if acts:
                        engine.reach(segment, repetition, acts)
            engine.after_forward(segment, repetition)

    def _is_noted(self, repetition: int, count: int) -> bool:
        """Of equal repetitions the first and the last two tell all."""
        return not self.engine.is_even or repetition < NOTED or repetition >= count - NOTED

    def backward(self) -> None:
        """Every segment's backward pass, the last one first."""
        spots = self.spots
        remaining = {segment.index: segment.repeat for segment in self.tape.segments}
        for each, own in zip(self.passes.backward, spots.backward, strict=True):
            index = each.segment.index
            for repetition in range(each.repeats):
                remaining[index] -= 1
                self._backward(each, own, repetition, remaining[index])
        self.ledger.rest(spots.after_backward)

    def let_go(self) -> None:
        """The loss goes, and with it all that is left of the model's."""
        self.ledger.rest(self.spots.between)

    def _backward(self, each: BackwardPass, own: PassSpots, repetition: int, copy: int) -> None:
        segment, ledger, engine = each.segment, self.ledger, self.engine
        is_noted = self._is_noted(repetition, each.repeats)
        if repetition == NOTED and not is_noted:
            ledger.look_away()
        elif repetition == each.repeats - NOTED:
            ledger.look_again()
        if is_noted:
            ledger.stand(own.start, repetition)
        engine.before_backward(segment, copy)
        for interval, pieces in zip(each.intervals, own.stretches, strict=True):
            if is_noted:
                for peak, end, acts in pieces:
                    ledger.rise(peak, repetition)
                    ledger.stand(end, repetition)
                    if acts:
                        engine.reach(segment, copy, acts)
            parameter = interval.parameter
            if parameter is not None:
                is_own = parameter in segment.parameters
                self._gradient((parameter, copy if is_own else 0), interval)
        if own.end is not None and repetition == each.repeats - 1:
            ledger.stand(own.end, repetition)
        engine.after_backward(segment, copy)

    def _gradient(self, weight: tuple[Parameter, int], interval: Interval) -> None:
        """Hand a gradient over once autograd has added all of it up (``Playback._gradient``)."""
        ledger, made = self.ledger, interval.gradient
        block: Block | None = None
        if isinstance(made, GradientBuffer):
            block = ledger.allocate(made.num_bytes, 0, ComponentKind.GRADIENTS, weight)
        uses = self.uses.get(weight[0])
        if uses is not None:
            left, present = self.waiting.pop(weight, (uses, None))
            if present is not None and block is not None:
                ledger.free(present)
            present = present if block is None else block
            assert present is not None
            if left > 1:
                self.waiting[weight] = left - 1, present
                return
            block = present
        assert block is not None
        self.engine.gradient_ready(weight, block)


def repeated_uses(passes: StepPasses) -> dict[Parameter, int]:
    """Weights whose gradient is computed more than once in a backward pass, and how often."""
    own: dict[Parameter, int] = {}
    foreign: dict[Parameter, int] = {}
    for each in passes.backward:
        found: dict[Parameter, int] = {}
        for interval in each.intervals:
            parameter = interval.parameter
            if parameter is None:
                continue
            if parameter in each.segment.parameters:
                found[parameter] = found.get(parameter, 0) + 1
            else:
                foreign[parameter] = foreign.get(parameter, 0) + each.repeats
        for parameter, count in found.items():
            own[parameter] = max(own.get(parameter, 0), count)
    totals = {each: own.get(each, 0) + foreign.get(each, 0) for each in (*own, *foreign)}
    return {parameter: count for parameter, count in totals.items() if count > 1}


def height_entries(height: Height) -> list[Entry]:
    """What the model itself holds at a moment."""
    return [
        Entry(ComponentKind.ACTIVATIONS, height.activations_bytes, "kept for the backward pass"),
        Entry(ComponentKind.LOGITS_AND_LOSS, height.loss_bytes, "the head and its loss"),
        Entry(ComponentKind.TEMPORARIES, height.temporaries_bytes, "inside or between operations"),
    ]
