"""Where an engine finds the model while it acts: levels of the passes, between stops.

The walks know how high the model's own allocations rise above the level at which a repetition of a
segment begins, so between two acts of an engine there is one number to look at.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from memplan.fast_dataclass import dataclass, field, replace
from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter, Storage
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.passes import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.stops import Acts, Cut, Stops, backward_cuts, forward_cuts
from memplan.memory.walks.backward_profile import GradientBuffer, Interval
from memplan.memory.walks.walk import WORKSPACE, Event, InTransit, Level

Piece = tuple[Level, Level, Acts]
"""Events between two stops: the highest level, the one at the end, and what is done there."""
Spot = int
"""A level of a pass: its number in ``Spots.levels``."""
Pass = ForwardPass | BackwardPass
_NOTHING = Level()


class Spots:
    """Where an engine may find the model: levels of all passes, in an order that every batch shares."""

    def __init__(
        self, passes: StepPasses, stops: "StopsBySegment", beside: "Spots | None" = None
    ) -> None:
        self.passes = passes
        self.levels: list[tuple[Pass | None, Level | Height]] = (
            [] if beside is None else beside.levels
        )
        """A level above where a repetition of a pass begins, or the model's height between passes."""
        self.others: list[Spots] = []
        """Spots of other models, whose levels are among these."""
        self.between = self._add(None, Height())
        """Between steps, where the model holds nothing."""
        self.at_return = self._add(None, passes.at_return)
        self.after_forward = self._add(None, passes.after_forward)
        self.after_backward = self._add(None, passes.after_backward)
        self.forward = [self._forward(each, stops) for each in passes.forward]
        self.backward = [self._backward(each, stops) for each in passes.backward]
        self.after_inputs = self.after_weights = self.between
        self.inputs: list[PassSpots] = []
        self.weights: list[PassSpots] = []
        if passes.inputs:
            self.after_inputs = self._add(None, passes.after_inputs)
            self.after_weights = self._add(None, passes.after_weights)
            self.inputs = [self._backward(each, stops) for each in passes.inputs]
            self.weights = [self._backward(each, stops) for each in passes.weights]

    def of(self, passes: StepPasses) -> "Spots":
        """Those of a model, the trained one or one beside it."""
        return next((each for each in self.others if each.passes is passes), self)

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
            for pieces in (_whole_intervals(each) if own is None else _cut_intervals(each, own))
        ]
        last = each.profile.end
        earlier = last.earlier_bytes - each.released_bytes
        end = self._add(each, replace(last, earlier_bytes=earlier))
        gradients = [_handed_over(each.segment, interval) for interval in each.intervals]
        return PassSpots(start=start, stretches=stretches, end=end, gradients=gradients)

    @cached_property
    def uses(self) -> dict[Parameter, int]:
        """Weights whose gradient is computed more than once in a backward pass, and how often."""
        return repeated_uses(self.passes)

    @cached_property
    def acts(self) -> tuple[object, ...]:
        """What an engine does in each stretch, to be compared."""
        return tuple(
            tuple(tuple(acts) for _, _, acts in stretch)
            for each in (*self.forward, *self.backward)
            for stretch in each.stretches
        )

    def height(self, spot: Spot, repetition: int) -> Height:
        """What the model holds, by component."""
        each, level = self.levels[spot]
        if isinstance(level, Height):
            return level
        assert each is not None
        return each.start_of(repetition).plus(level, loss=each.loss)

    @cached_property
    def highest_bytes(self) -> int:
        """The most that the model itself holds, whatever its engine does [bytes]."""
        return max(self.heights)

    @cached_property
    def heights(self) -> list[int]:
        """The most that the model holds at each spot, in any repetition [bytes]."""
        return [
            max(_ends(each, line)) for (each, _), line in zip(self.levels, self.lines, strict=True)
        ]

    @cached_property
    def lines(self) -> list[tuple[int, int, int]]:
        """What the model holds at each spot, as a straight line in the repetition: in the first, and in
        all later ones the intercept and the slope [bytes]."""
        return [_line(each, level) for each, level in self.levels]


def _ends(each: Pass | None, line: tuple[int, int, int]) -> list[int]:
    """A line's values where it may be highest: in the first, the second and the last repetition."""
    first, intercept, slope = line
    last = each.repeats - 1 if each is not None else 0
    return [first, intercept + slope, intercept + last * slope] if last else [first]


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
HandedOver = tuple[Parameter, bool, int | None]
"""A weight whose gradient is handed over, whether each repetition has its own, and the gradient's bytes; None:
one that waits has taken it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSpots:
    """The spots of one repetition of a pass."""

    start: Spot
    stretches: list[list[Stretch]]
    """For each interval of a backward pass; one list for a forward pass."""
    end: Spot | None
    """After the last repetition of a backward pass, which may let more go than others do."""
    gradients: "list[HandedOver | None]" = field(default_factory=list)
    """What ends each interval of a backward pass."""


def _handed_over(segment: Segment, interval: Interval) -> HandedOver | None:
    parameter, made = interval.parameter, interval.gradient
    if parameter is None:
        return None
    size = made.num_bytes if isinstance(made, GradientBuffer) else None
    return parameter, parameter in segment.parameters, size


def _whole_intervals(each: BackwardPass) -> list[list[Piece]]:
    """Those after which no gradient comes, as a layer's that is run again, go into the next one's."""
    found: list[list[Piece]] = []
    peak = _NOTHING
    last = len(each.intervals) - 1
    for number, interval in enumerate(each.intervals):
        if interval.peak.total_bytes > peak.total_bytes or not found or found[-1]:
            peak = interval.peak
        is_merged = interval.parameter is None and number < last
        found.append([] if is_merged else [(peak, interval.end, ())])
    return found


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
        self.kept = {storage for each in segment.operations for storage in each.held}
        self.kept.update(storage for region in segment.regions for storage in region.given)
        if segment.checkpointed:
            self.kept.update(segment.given)
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
        highest, saved, earlier = self.total, self.saved, self.earlier
        for key, size in events:
            if size:
                self.sizes[key] = size
                self._change(key, size)
                if self.total > highest:
                    highest, saved, earlier = self.total, self.saved, self.earlier
            elif key is not WORKSPACE:
                self._change(key, -self._size(key))
        end = _level(self.total, self.saved, self.earlier)
        return _level(highest, saved, earlier), end, acts

    def _size(self, key: object) -> int:
        size = self.sizes.pop(key, None)
        if size is None:
            assert isinstance(key, Storage | GradientBuffer | InTransit)
            size = key.num_bytes
        return size

    def _change(self, key: object, size: int) -> None:
        self.total += size
        if isinstance(key, InTransit):
            self.earlier += size
        elif isinstance(key, Storage) and key in self.kept:
            if key.segment == self.segment.index or key is self.segment.logits:
                self.saved += size
            else:
                self.earlier += size

    def hand_over(self, interval: Interval) -> None:
        """The gradient that ends an interval is its engine's now."""
        if interval.gradient is not None:
            self._change(interval.gradient, -self._size(interval.gradient))


def _level(total: int, saved: int, earlier: int) -> Level:
    return Level(saved_bytes=saved, other_bytes=total - saved - earlier, earlier_bytes=earlier)


def height_entries(height: Height) -> list[Entry]:
    """What the model itself holds at a moment."""
    return [
        Entry(ComponentKind.ACTIVATIONS, height.activations_bytes, "kept for the backward pass"),
        Entry(ComponentKind.LOGITS_AND_LOSS, height.loss_bytes, "the head and its loss"),
        Entry(ComponentKind.TEMPORARIES, height.temporaries_bytes, "inside or between operations"),
    ]


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
