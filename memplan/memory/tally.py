"""What is alive over a run, by component, without playing every block out.

The walks know how high the model's own allocations rise above the level at which a repetition of a
segment begins, so between two acts of an engine there is one number to look at. A ``Tally`` is the
ledger that an engine's program writes its own blocks into; ``TallyPlayback`` moves the model's level
under it; and the fullest moment of every part of the run is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.graph.segments import Segment
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, Storage
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.ledger import Block, Ledger, Part
from memplan.memory.playback import (
    Acts,
    Cut,
    Engine,
    backward_cuts,
    forward_cuts,
)
from memplan.memory.step import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.walk import WORKSPACE, Event, GradientBuffer, Interval, Level
from memplan.fast_dataclass import dataclass

Place = tuple[ForwardPass | BackwardPass | None, int, Level | Height]
"""A moment of a pass: the repetition, and a level above where it begins; or one between passes."""
Piece = tuple[Level, Level, Acts]
"""Events between two stops: the highest level, the one at the end, and what is done there."""
_NOTHING = Level()


@dataclass(frozen=True, slots=True)
class Moment:
    """The fullest moment of a part of a run."""

    total_bytes: int
    held: tuple[int, ...]
    """By line, what programs hold."""
    place: Place | None
    """Where the model is then; None: it holds nothing."""


class Tally(Ledger):
    """A ledger that keeps sums: of what a program holds, by purpose, and the fullest moments."""

    __slots__ = (
        "_best", "_held", "_kinds", "_level", "_line_of", "_lines", "_names", "_part", "_place",
        "_sizes", "_total", "moments",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[Part, Moment] = {}
        self._part = Part.LOAD
        self._best: Moment | None = None
        self._total = 0
        """All that is alive."""
        self._level = 0
        """Of it, the model's own."""
        self._place: Place | None = None
        self._sizes: list[int] = []
        self._line_of: list[int] = []
        self._lines: dict[object, int] = {}
        self._kinds: list[ComponentKind] = []
        self._names: list[str] = []
        self._held: list[int] = []

    # -- what programs ask for ---------------------------------------------------------------------

    def enter(self, part: Part, step: int = 0) -> None:  # noqa: ARG002
        """A part of the run begins, or goes on in another micro-batch."""
        self._close()
        self._part = part
        self._best = self.moments.get(part)

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,  # noqa: ARG002
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block of some purpose."""
        size = -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
        line = self._lines.get(name)
        if line is None or self._kinds[line] is not kind:
            line = self._line(kind or ComponentKind.TEMPORARIES, name)
        self._held[line] += size
        self._total += size
        self._line_of.append(line)
        self._sizes.append(size)
        return len(self._sizes) - 1

    def move(self, block: Block, stream: int) -> None:
        """Streams make no difference to a sum."""

    def free(self, block: Block) -> None:
        """Give a block back."""
        if self._best is None or self._total > self._best.total_bytes:
            self._note()
        size = self._sizes[block]
        self._held[self._line_of[block]] -= size
        self._total -= size

    def empty_cache(self) -> None:
        """What is alive stays."""

    def _line(self, kind: ComponentKind, name: object) -> int:
        """The line of a purpose; blocks of single weights share their kind's."""
        text = name if isinstance(name, str) else ""
        key = (kind.label, text)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = len(self._held)
            self._held.append(0)
            self._kinds.append(kind)
            self._names.append(text)
        self._lines.setdefault(text or None, line)
        return line

    def playback(
        self,
        tape: Tape,
        passes: StepPasses,
        engine: Engine,
        *,
        workspace_bytes: int,  # noqa: ARG002
    ) -> "TallyPlayback":
        """Whose stretches are added up."""
        return TallyPlayback(tape, passes, self, engine)

    # -- where the model is ------------------------------------------------------------------------

    def stand(self, level_bytes: int, place: Place | None) -> None:
        """The model's level changes."""
        if self._best is None or self._total > self._best.total_bytes:
            self._note()
        self._total += level_bytes - self._level
        self._level = level_bytes
        self._place = place

    def rise(self, level_bytes: int, place: Place) -> None:
        """It rises so high before the next stop."""
        total = self._total - self._level + level_bytes
        if self._best is None or total > self._best.total_bytes:
            self._best = Moment(total, tuple(self._held), place)

    def _note(self) -> None:
        self._best = Moment(self._total, tuple(self._held), self._place)

    def _close(self) -> None:
        if self._best is None or self._total > self._best.total_bytes:
            self._note()
        assert self._best is not None
        self.moments[self._part] = self._best

    # -- what is found -----------------------------------------------------------------------------

    def forget_steps(self) -> None:
        """What came before was no steady step: only loading is kept."""
        self._close()
        self.moments = {Part.LOAD: self.moments[Part.LOAD]}
        self._best = None

    def close(self) -> None:
        """The run is over."""
        self._close()

    @property
    def held_bytes(self) -> int:
        """What programs hold now."""
        return self._total - self._level

    def entries(self, part: Part, *, origins: dict[ComponentKind, str]) -> list[Entry]:
        """A part's fullest moment by purpose."""
        moment = self.moments[part]
        entries = [
            Entry(kind, size, name or origins.get(kind, ""))
            for kind, name, size in zip(self._kinds, self._names, moment.held, strict=False)
        ]
        if moment.place is not None:
            entries += height_entries(_height(*moment.place))
        return entries


def _height(
    each: ForwardPass | BackwardPass | None, repetition: int, level: Level | Height
) -> Height:
    if isinstance(level, Height):
        return level
    assert each is not None
    return each.start_of(repetition).plus(level, loss=each.loss)


def height_entries(height: Height) -> list[Entry]:
    """What the model itself holds at a moment."""
    return [
        Entry(ComponentKind.ACTIVATIONS, height.activations_bytes, "kept for the backward pass"),
        Entry(ComponentKind.LOGITS_AND_LOSS, height.loss_bytes, "the head and its loss"),
        Entry(ComponentKind.TEMPORARIES, height.temporaries_bytes, "inside or between operations"),
    ]


class TallyPlayback:
    """Forward and backward of one micro-batch, stretch by stretch."""

    def __init__(self, tape: Tape, passes: StepPasses, ledger: Tally, engine: Engine) -> None:
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.engine = engine
        self.uses = repeated_uses(passes)
        self.waiting: dict[tuple[Parameter, int], tuple[int, Block]] = {}
        """Gradients of weights used more than once: how many are to come, and the sum so far."""
        self.forward_pieces: dict[int, list[Piece]] = {}
        self.backward_pieces: dict[int, list[list[Piece]]] = {}

    # -- forward -----------------------------------------------------------------------------------

    def forward(self) -> None:
        """Every segment's forward pass."""
        for number, each in enumerate(self.passes.forward):
            pieces = self.forward_pieces.get(number)
            if pieces is None:
                pieces = self.forward_pieces[number] = self._forward_pieces(each)
            self._forward(each, pieces)
        self._stand(self.passes.after_forward)

    def _stand(self, height: Height) -> None:
        """Between passes."""
        self.ledger.stand(height.total_bytes, (None, 0, height))

    def _forward_pieces(self, each: ForwardPass) -> list[Piece]:
        stops = self.engine.stops(each.segment)
        if stops is None:
            return [(each.peak, each.profile.end, ())]
        return Folding(each.segment).pieces(each.profile.events, forward_cuts(each, stops))

    def _forward(self, each: ForwardPass, pieces: list[Piece]) -> None:
        segment, ledger, engine = each.segment, self.ledger, self.engine
        for repetition in range(segment.repeat):
            base = each.start_of(repetition).total_bytes
            ledger.stand(base, (each, repetition, _NOTHING))
            engine.before_forward(segment, repetition)
            for peak, end, acts in pieces:
                ledger.rise(base + peak.total_bytes, (each, repetition, peak))
                ledger.stand(base + end.total_bytes, (each, repetition, end))
                if acts:
                    engine.reach(segment, repetition, acts)
            engine.after_forward(segment, repetition)

    # -- backward ----------------------------------------------------------------------------------

    def backward(self) -> None:
        """Every segment's backward pass, the last one first."""
        remaining = {segment.index: segment.repeat for segment in self.tape.segments}
        for number, each in enumerate(self.passes.backward):
            pieces = self.backward_pieces.get(number)
            if pieces is None:
                pieces = self.backward_pieces[number] = self._backward_pieces(each)
            index = each.segment.index
            for repetition in range(each.repeats):
                remaining[index] -= 1
                self._backward(each, repetition, remaining[index], pieces)
        self._stand(self.passes.after_backward)

    def let_go(self) -> None:
        """The loss goes, and with it all that is left of the model's."""
        self.ledger.stand(0, None)

    def _backward_pieces(self, each: BackwardPass) -> list[list[Piece]]:
        """For each interval."""
        stops = self.engine.stops(each.segment)
        if stops is None:
            return [[(interval.peak, interval.end, ())] for interval in each.intervals]
        folding = Folding(each.segment)
        found: list[list[Piece]] = []
        for interval, cuts in zip(each.intervals, backward_cuts(each, stops), strict=True):
            found.append(folding.pieces(interval.events, cuts))
            folding.hand_over(interval)
        return found

    def _backward(
        self, each: BackwardPass, repetition: int, copy: int, pieces: list[list[Piece]]
    ) -> None:
        segment, ledger, engine = each.segment, self.ledger, self.engine
        base = each.start_of(repetition).total_bytes
        ledger.stand(base, (each, repetition, _NOTHING))
        engine.before_backward(segment, copy)
        own = segment.parameters
        for interval, stretch in zip(each.intervals, pieces, strict=True):
            for peak, end, acts in stretch:
                ledger.rise(base + peak.total_bytes, (each, repetition, peak))
                if acts:
                    ledger.stand(base + end.total_bytes, (each, repetition, end))
                    engine.reach(segment, copy, acts)
            end = interval.end
            ledger.stand(base + end.total_bytes, (each, repetition, end))
            parameter = interval.parameter
            if parameter is not None:
                self._gradient((parameter, copy if parameter in own else 0), interval)
        if each.released_bytes and repetition == each.repeats - 1:
            after = replace(end, earlier_bytes=end.earlier_bytes - each.released_bytes)
            ledger.stand(base + after.total_bytes, (each, repetition, after))
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


class Folding:
    """Levels of a walk's events between stops that are not the walk's own."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.kept = {storage for each in segment.operations for storage in each.saved}
        if segment.checkpointed and segment.input is not None:
            self.kept.add(segment.input.storage)
        self.sizes: dict[object, int] = {}
        self.level = Level()

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
        highest = self.level
        for key, size in events:
            if size:
                self.sizes[key] = size
                self._change(key, size)
                if self.level.total_bytes > highest.total_bytes:
                    highest = self.level
            elif key is not WORKSPACE:
                self._change(key, -self._size(key))
        return highest, self.level, acts

    def _size(self, key: object) -> int:
        size = self.sizes.pop(key, None)
        if size is None:
            assert isinstance(key, Storage | GradientBuffer)
            size = key.num_bytes
        return size

    def _change(self, key: object, size: int) -> None:
        saved = other = earlier = 0
        if isinstance(key, Storage) and key in self.kept:
            if key.segment == self.segment.index:
                saved = size
            else:
                earlier = size
        else:
            other = size
        now = self.level
        self.level = Level(
            saved_bytes=now.saved_bytes + saved,
            other_bytes=now.other_bytes + other,
            earlier_bytes=now.earlier_bytes + earlier,
        )

    def hand_over(self, interval: Interval) -> None:
        """The gradient that ends an interval is its engine's now."""
        if interval.gradient is not None:
            self._change(interval.gradient, -self._size(interval.gradient))
