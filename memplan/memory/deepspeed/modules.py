"""Which modules run, and when: what stage 3 hangs its hooks on.

A module's parameters are fetched before its first operation and let go after its last one, in the
forward pass, in backward, when the gradient of its output arrives, and when a checkpointed layer
runs again. Parameters that stay gathered (``stage3_param_persistence_threshold``) need neither; but
the hooks of a module that has no others, or none at all, still start a round of prefetching. Norms
and the modules around those with parameters are known from the parameters' names, activation
functions, dropouts and the model itself from what the tape notes (``Segment.entered``, ``left``).
Some mixtures are one module to the engine (``Segment.sealed``): all of their parameters are fetched
together, and their gradients are reduced only when the last one is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from memplan.fast_dataclass import dataclass
from memplan.graph.segments import Operation, Segment
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter
from memplan.memory.deepspeed.partition import ModelWeights
from memplan.memory.deepspeed.recording import REMEMBERED, Keyed
from memplan.memory.playback import Stops
from memplan.memory.step import StepPasses
from memplan.memory.walk import ForwardWalk, Interval, last_recomputed


class Act(IntEnum):
    """What happens to a rank's memory next."""

    FETCH = 0
    """A module's parameters are needed; the operand is the module."""
    RELEASE = 1
    """They are not needed any more."""
    LEVEL = 2
    """Activations pass through a level; the operand is its height above the segment's start."""
    PEAK = 3
    """The highest level of one interval of the backward walk; the operand is its number."""
    GRADIENT = 4
    """It ends, maybe with a gradient; the operand is its number."""
    HAND_OVER = 5
    """A module that is taken as a whole hands all of its gradients over; the operand is it."""
    DETACH = 6
    """As RELEASE where a checkpointed layer is run again: the graph's own references to what was
    gathered stay until the backward pass has used them."""


@dataclass(slots=True)
class Module:
    """One module with parameters that have to be gathered, in one repetition of its segment."""

    weights: list[tuple[int, int]]
    """For each parameter that is gathered for it, its number in the first repetition and the step
    to the next."""
    delayed: list[tuple[int, int]] = field(default_factory=list)
    """Parameters whose gradients wait until its whole backward pass is over."""


@dataclass(slots=True)
class SegmentScript:
    """What one repetition of a segment does, in order."""

    forward: list[tuple[Act, int]] = field(default_factory=list)
    backward: list[tuple[Act, int]] = field(default_factory=list)
    modules: list[Module] = field(default_factory=list)


def write_scripts(
    tape: Tape, passes: StepPasses, weights: ModelWeights, *, persistent: frozenset[Parameter]
) -> list[SegmentScript]:
    """The scripts of all segments, in the tape's order."""
    intervals = {stage.segment.index: stage.intervals for stage in passes.backward}
    return [
        _Writer(segment, intervals.get(segment.index, ()), weights, persistent).write()
        for segment in tape.segments
    ]


@dataclass(frozen=True, slots=True)
class SegmentStops:
    """Where a segment's hooks stand, and the modules they are of."""

    stops: Stops
    modules: list[Module]


class FoundStops(list[SegmentStops]):
    """Those of all segments, in the tape's order."""

    delayed: frozenset[int] = frozenset()
    """Parameters whose gradients wait for others of their module."""


def find_stops(tape: Tape, weights: ModelWeights) -> FoundStops:
    """Where hooks stand in all segments; the small parameters' modules are among them."""
    found = FoundStops()
    delayed: set[int] = set()
    for segment in tape.segments:
        writer = _Writer(segment, (), weights, frozenset())
        found.append(SegmentStops(writer.stops(), writer.script.modules))
        delayed |= {
            first + stride * copy
            for module in writer.script.modules
            for first, stride in module.delayed
            for copy in range(segment.repeat)
        }
    found.delayed = frozenset(delayed)
    return found


class ScriptShape:
    """Everything in the scripts of a step but their levels: equal shapes are one object."""

    __slots__ = ()


@lru_cache(maxsize=REMEMBERED)
def _script_shape(*key: object) -> ScriptShape:
    del key  # what tells shapes apart
    return ScriptShape()


@dataclass(frozen=True, slots=True)
class Scripts:
    """The scripts of a step."""

    segments: list[SegmentScript]
    """In the tape's order."""
    shape: ScriptShape


@lru_cache(maxsize=8)
def remembered_scripts(
    tape: Keyed[Tape],
    passes: Keyed[StepPasses],
    weights: Keyed[ModelWeights],
    persistent: frozenset[Parameter],
) -> Scripts:
    """The scripts of one walk; remembered, since sizes of the job share them."""
    scripts = write_scripts(tape.value, passes.value, weights.value, persistent=persistent)
    shape = _script_shape(
        tuple(_outline(script) for script in scripts),
        tuple(segment.repeat for segment in tape.value.segments),
        tuple(stage.segment.index for stage in passes.value.forward),
        tuple((stage.segment.index, stage.repeats) for stage in passes.value.backward),
    )
    return Scripts(scripts, shape)


def _outline(script: SegmentScript) -> tuple[object, ...]:
    """A script without its levels."""

    def without_levels(acts: Sequence[tuple[Act, int]]) -> tuple[tuple[Act, int], ...]:
        return tuple((act, 0 if act is Act.LEVEL else operand) for act, operand in acts)

    modules = tuple((tuple(each.weights), tuple(each.delayed)) for each in script.modules)
    return without_levels(script.forward), without_levels(script.backward), modules


class _Stretch:
    """Walks the intervals of a backward pass beside its operations, and writes their levels down.

    An interval is cut at the stations where something is fetched; its highest level belongs to one
    of the pieces.
    """

    def __init__(
        self, acts: list[tuple[Act, int]], intervals: Iterator[tuple[int, Interval]]
    ) -> None:
        self.acts = acts
        self._intervals = intervals
        self.number = 0
        self.interval: Interval | None = None
        self._go_on()
        self._is_found = False
        """The interval's highest level has been written."""
        self._passed = 0
        """The highest level since the last fetch, of stations where nothing was."""
        self._station = 0

    def reach(self, position: int, fetched: Sequence[tuple[Act, int]]) -> None:
        """Modules' backward passes begin before this operation's."""
        interval = self.interval
        if interval is not None and self._station < len(interval.stations):
            station = interval.stations[self._station]
            if station.position == position:
                self._station += 1
                self._passed = max(self._passed, station.peak_bytes)
                if fetched:
                    self._write(self._passed)
                    self.acts.append((Act.LEVEL, station.level_bytes))
        self.acts += fetched

    def finish(self, parameter: Parameter) -> None:
        """Go on where the present interval ends with this parameter's gradient."""
        if self.interval is not None and self.interval.parameter is parameter:
            self._next()

    def finish_all(self) -> None:
        """Go through what is left."""
        while self.interval is not None:
            self._next()

    def _next(self) -> None:
        assert self.interval is not None
        left = self.interval.stations[self._station :]
        highest = max([self._passed, *[station.peak_bytes for station in left]])
        self._write(max(highest, self.interval.last_peak_bytes), is_last=True)
        self.acts.append((Act.GRADIENT, self.number))
        self._go_on()
        self._station = 0
        self._is_found = False

    def _go_on(self) -> None:
        self.number, self.interval = next(self._intervals, (0, None))

    def _write(self, peak_bytes: int, *, is_last: bool = False) -> None:
        assert self.interval is not None
        self._passed = 0
        highest = peak_bytes == self.interval.peak.total_bytes
        if not self._is_found and (highest or is_last):
            self._is_found = True
            self.acts.append((Act.PEAK, self.number))
        else:
            self.acts.append((Act.LEVEL, peak_bytes))


class _BackwardStops(NamedTuple):
    before: dict[int, list[tuple[Act, int]]]
    after: dict[int, list[tuple[Act, int]]]
    end: list[tuple[Act, int]]


class _Writer:
    def __init__(
        self,
        segment: Segment,
        intervals: Sequence[Interval],
        weights: ModelWeights,
        persistent: frozenset[Parameter],
    ) -> None:
        self.segment = segment
        self.intervals = intervals
        self.weights = weights
        self.script = SegmentScript()
        self.names: dict[str, int] = {}
        self.owners = {each: module for module, each in segment.tied}
        for each in segment.parameters:
            self.owners[each] = each.module
        self.modules_of: list[list[int]] = [
            self._modules(operation, persistent) for operation in segment.operations
        ]
        self.entered = self._noted(segment.entered)
        self.left = self._noted(segment.left)
        """Modules that only the tape's notes name, by the operation they are called before."""

    def write(self) -> SegmentScript:
        segment = self.segment
        levels = ForwardWalk(segment, keep=not segment.checkpointed).run().levels
        self.script.forward = self._run(levels, len(segment.operations), cut=False)
        self.script.backward = self._back()
        return self.script

    def _modules(self, operation: Operation, persistent: frozenset[Parameter]) -> list[int]:
        found: list[int] = []
        for tensor in operation.inputs:
            if isinstance(tensor, Parameter):
                name = self.owners.get(tensor, tensor.module)
                for each in self._with_parents(name):
                    number = self._number(each)
                    if number not in found:
                        found.append(number)
                names = self._with_parents(name)
                own = self.script.modules[self.names[names[-1]]]
                place = self._place(tensor)
                if tensor not in persistent and place not in own.weights:
                    own.weights.append(place)
                if names[-1] in self.segment.sealed and place not in own.delayed:
                    own.delayed.append(place)
        return found

    def _with_parents(self, name: str) -> list[str]:
        """A module after those around it in its segment: a layer is one itself, the rest is not.

        What is inside a module that is taken as a whole goes by that.
        """
        names = with_parents(name)
        if name and not self.segment.is_layer:
            names = names[1:]
        names = [each for each in names if each not in self.segment.unmade]
        for number, each in enumerate(names):
            if each in self.segment.sealed:
                return names[: number + 1]
        return names

    def _noted(self, notes: Sequence[tuple[int, str]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for position, name in notes:
            if not self.segment.sealed.isdisjoint(with_parents(name)):
                continue
            found.setdefault(position, []).append(self._number(name))
        return found

    def _number(self, name: str) -> int:
        number = self.names.get(name)
        if number is None:
            number = self.names[name] = len(self.script.modules)
            self.script.modules.append(Module([]))
        return number

    def _place(self, parameter: Parameter) -> tuple[int, int]:
        own = self.weights.segments[self.segment.index]
        position = own.positions.get(parameter)
        if position is None:
            return self.weights.owners[parameter], 0
        stride = own.stride if self.segment.num_copies > 1 else 0
        return own.first + position, stride

    def forward_stops(self, stop: int, *, cut: bool) -> dict[int, list[tuple[Act, int]]]:
        """What hooks do before each operation of a forward pass; at the end under their number.

        ``cut`` short before ``stop``'s module is over.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, modules in enumerate(self.modules_of[: stop + cut]):
            for module in modules:
                first.setdefault(module, position)
                last[module] = position
        stops: dict[int, list[tuple[Act, int]]] = {}
        released: list[tuple[Act, int]] = []
        for position, modules in enumerate(self.modules_of[: stop + cut]):
            fetched = [*self.entered.get(position, ())]
            fetched += [module for module in modules if first[module] == position]
            acts = [*released, *((Act.FETCH, module) for module in fetched)]
            if acts:
                stops[position] = acts
            closing = [module for module in modules if last[module] == position]
            released = self._released(closing) if position < stop else []
        if not cut:
            released = [*released, *((Act.FETCH, each) for each in self.entered.get(stop, ()))]
        if released:
            stops[stop] = [*stops.get(stop, ()), *released]
        return stops

    def _run(self, levels: list[tuple[int, int]], stop: int, *, cut: bool) -> list[tuple[Act, int]]:
        """Forward: what hooks do, and the levels in between."""
        stops = self.forward_stops(stop, cut=cut)
        acts: list[tuple[Act, int]] = []
        peak = 0
        for position in range(stop + 1):
            let_go = False
            for act in stops.get(position, ()):
                if peak and (act[0] is Act.FETCH or not let_go):
                    acts.append((Act.LEVEL, peak))
                    peak = 0
                if act[0] is Act.RELEASE:
                    let_go, peak = True, levels[position - 1][1]
                acts.append(act)
            if position < len(levels):
                peak = max(peak, levels[position][0])
        if peak:
            acts.append((Act.LEVEL, peak))
        return acts

    def _released(self, modules: list[int]) -> list[tuple[Act, int]]:
        """Let go of what these modules gathered; empty ones gathered nothing."""
        return [(Act.RELEASE, module) for module in modules if self.script.modules[module].weights]

    def backward_stops(self) -> _BackwardStops:
        """What hooks do before and after each operation's backward pass."""
        operations = self.segment.operations
        first: dict[int, int] = {}
        final: dict[int, int] = {}
        order = [
            number for number in reversed(range(len(operations))) if operations[number].gradients
        ]
        for position in order:
            for module in self.modules_of[position]:
                first.setdefault(module, position)
                final[module] = position
        before: dict[int, list[tuple[Act, int]]] = {}
        after: dict[int, list[tuple[Act, int]]] = {}
        for position in order:
            modules = self.modules_of[position]
            fetched = [*self.left.get(position + 1, ())]
            fetched += [module for module in modules if first[module] == position]
            if fetched:
                before[position] = [(Act.FETCH, module) for module in fetched]
            closing = [each for each in modules if final[each] == position]
            delayed = [each for each in closing if self.script.modules[each].delayed]
            acts = [*((Act.HAND_OVER, each) for each in delayed), *self._released(closing)]
            if acts:
                after[position] = acts
        end = [(Act.FETCH, module) for module in self.left.get(0, ())]
        return _BackwardStops(before, after, end)

    def stops(self) -> Stops:
        """All of a repetition's."""
        operations = self.segment.operations
        again: dict[int, list[tuple[Act, int]]] = {}
        if self.segment.checkpointed:
            stop, cut = self._end_of_recomputation()
            again = self._inside_layer(self.forward_stops(stop, cut=cut))
        backward = self.backward_stops()
        return Stops(
            forward=self.forward_stops(len(operations), cut=False),
            again=again,
            before_backward=backward.before,
            after_backward=backward.after,
            end=backward.end,
        )

    def _end_of_recomputation(self) -> tuple[int, bool]:
        """The operation that it ends at, and whether the modules around that are never left."""
        if self.segment.kept_outputs:
            return len(self.segment.operations), False
        return last_recomputed(self.segment), True

    def _inside_layer(
        self, stops: dict[int, list[tuple[Act, int]]]
    ) -> dict[int, list[tuple[Act, int]]]:
        """Those of what is run again: the layer's own hooks are outside of it."""
        layer = self.names.get("")
        detached = {Act.RELEASE: Act.DETACH}
        return {
            position: [(detached.get(act, act), each) for act, each in acts if each != layer]
            for position, acts in stops.items()
        }

    def _back(self) -> list[tuple[Act, int]]:
        segment = self.segment
        stops = self.backward_stops()
        acts: list[tuple[Act, int]] = []
        again: list[tuple[Act, int]] = []
        if segment.checkpointed:
            again = self._recompute()
        # What runs again has its own acts.
        own = enumerate(self.intervals)
        intervals = ((number, each) for number, each in own if not each.recomputes)
        stretch = _Stretch(acts, intervals)
        for position in range(len(segment.operations) - 1, -1, -1):
            operation = segment.operations[position]
            if not operation.gradients:
                continue
            stretch.reach(position, stops.before.get(position, ()))
            if again and (operation.saved or self.modules_of[position]):
                acts += again
                again = []
            for tensor in operation.inputs:
                if isinstance(tensor, Parameter):
                    stretch.finish(tensor)
            acts += stops.after.get(position, ())
        acts += again
        stretch.finish_all()
        acts += stops.end
        return acts

    def _recompute(self) -> list[tuple[Act, int]]:
        """The forward pass again; the layer's own hooks are outside of what is run again."""
        levels = ForwardWalk(self.segment, keep=True).recompute().levels
        stop, cut = self._end_of_recomputation()
        acts = self._run(levels, stop, cut=cut)
        layer = self.names.get("")
        return [each for each in acts if each[0] is Act.LEVEL or each[1] != layer]


def with_parents(name: str) -> list[str]:
    """A module's name after those of the modules around it, the layer's own (empty) first.

    >>> with_parents("mlp.up_proj")
    ['', 'mlp', 'mlp.up_proj']
    """
    parts = name.split(".")
    return ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]
