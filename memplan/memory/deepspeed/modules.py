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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.remembered import OF_TAPES
from memplan.graph.stacks import BASE_MODEL, WHOLE_MODEL
from memplan.memory.deepspeed.partition import ModelWeights, model_weights
from memplan.memory.stops import Stops
from memplan.memory.walks.walk import last_recomputed
from memplan.training.compilation import Compilation

MAX_VISITS = 16
"""Tiles of one operation whose modules are followed; those of many more only cost time."""


class Act(IntEnum):
    """What happens to a rank's memory next."""

    FETCH = auto()
    """A module's parameters are needed; the operand is the module."""
    RELEASE = auto()
    """They are not needed any more."""
    HAND_OVER = auto()
    """A module that is taken as a whole hands all of its gradients over; the operand is it."""
    READ = auto()
    """A module reads a weight of one inside it by itself; the operand is the weight's place among those read so."""
    DETACH = auto()
    """As RELEASE where a checkpointed layer is run again: the graph's own references to what was
    gathered stay until the backward pass has used them."""
    PASS_BY = auto()
    """A module's backward pass is through, and no hook is told: one that was called several times counts the
    last call alone (``ds_grads_remaining`` is set to 0 before each), whose backward pass is the first."""


@dataclass(slots=True)
class Module:
    """One module with parameters that have to be gathered, in one repetition of its segment."""

    weights: list[tuple[int, int]]
    """For each parameter that is gathered for it, its number in the first repetition and the step
    to the next."""
    delayed: list[tuple[int, int]] = field(default_factory=list)
    """Parameters whose gradients wait until its whole backward pass is over."""
    external: list[tuple[int, int]] = field(default_factory=list)
    """Parameters of modules inside it that it reads by itself, and is fetched with once it has
    (``register_external_parameter``)."""
    inside: list[tuple[int, int]] | None = None
    """All parameters in it and in the modules within it; None: the whole model's."""
    has_gradient: bool = False
    """What it is given has one, which sets the hook behind its backward pass off."""


@dataclass(frozen=True, slots=True)
class SegmentStops:
    """Where a segment's hooks stand, and the modules they are of."""

    stops: Stops
    modules: list[Module]
    reads: list[tuple[int, int]]
    """What modules read of others by themselves, in turn."""

    @property
    def members(self) -> tuple[object, ...]:
        """What its modules are, to be compared."""
        modules = self.modules
        own = tuple((*each.weights, *each.delayed, *each.external) for each in modules)
        return own, tuple(self.reads)


class FoundStops(list[SegmentStops]):
    """Those of all segments, in the tape's order."""

    delayed: frozenset[int] = frozenset()
    """Parameters whose gradients wait for others of their module."""


@OF_TAPES.remembered(maxsize=64)
def find_stops(tape: Tape) -> FoundStops:
    """Where hooks stand in all segments; the small parameters' modules are among them."""
    weights = model_weights(tape)
    found = FoundStops()
    delayed: set[int] = set()
    for segment in tape.segments:
        writer = _Writer(segment, weights)
        found.append(SegmentStops(writer.stops(), writer.modules, writer.read))
        delayed |= {
            first + stride * copy
            for module in writer.modules
            for first, stride in module.delayed
            for copy in range(segment.repeat)
        }
    found.delayed = frozenset(delayed)
    return found


class _BackwardStops(NamedTuple):
    before: dict[int, list[tuple[Act, int]]]
    after: dict[int, list[tuple[Act, int]]]
    end: list[tuple[Act, int]]


class _Writer:
    def __init__(self, segment: Segment, weights: ModelWeights) -> None:
        self.segment = segment
        self.weights = weights
        self.modules: list[Module] = []
        self.names: dict[str, int] = {}
        self.owners = {each: module for module, each in segment.tied}
        for each in segment.parameters:
            self.owners[each] = each.module
        self.modules_of: list[list[int]] = [
            self._modules_of(operation) for operation in segment.operations
        ]
        self._spread()
        self.calls = self._found_calls()
        """Of modules that are called several times, the operation that each call begins with."""
        self._look_at_inputs()
        self.leaves = [self._leaves(each) for each in segment.operations]
        """Of operations that run others tile by tile, the modules that each tile calls."""
        self.entered = self._noted(segment.entered)
        self.left = self._noted(segment.left)
        """Modules that only the tape's notes name, by the operation they are called before."""
        self.read: list[tuple[int, int]] = []
        self.reads: dict[int, list[tuple[int, int]]] = {}
        """By the operation that it happens before, who reads and which of these."""
        self._look_at_reads()
        self._look_inside()

    def _modules_of(self, operation: Operation) -> list[int]:
        found: list[int] = []
        for tensor in operation.inputs:
            if isinstance(tensor, Parameter):
                name = self.owners.get(tensor, tensor.module)
                for each in self._with_parents(name):
                    number = self._number(each)
                    if number not in found:
                        found.append(number)
                names = self._with_parents(name)
                own = self.modules[self.names[names[-1]]]
                place = self._place(tensor)
                if place not in own.weights:
                    own.weights.append(place)
                if names[-1] in self.segment.sealed and place not in own.delayed:
                    own.delayed.append(place)
        return found

    def _spread(self) -> None:
        """A module runs from its first operation to its last one: a norm's weight comes into its product alone."""
        for start, stop, name in self.segment.spans:
            names = dict.fromkeys(self._with_parents(name))
            around = [self.names[each] for each in names if each in self.names]
            for modules in self.modules_of[start:stop]:
                modules += [each for each in around if each not in modules]

    def _found_calls(self) -> dict[int, list[int]]:
        begun: dict[str, list[int]] = {}
        for start, stop, name in self.segment.spans:
            if stop > start:
                begun.setdefault(name, []).append(start)
        return {
            self.names[name]: sorted(starts)
            for name, starts in begun.items()
            if len(starts) > 1 and name in self.names
        }

    def _call(self, module: int, position: int) -> tuple[int, int]:
        """A module and which call of it an operation is of: hooks stand around each."""
        return module, bisect_right(self.calls.get(module, ()), position)

    def _look_at_inputs(self) -> None:
        """Which modules read something with a gradient that none of their own operations made."""
        made: list[set[Tensor]] = [set() for _ in self.modules]
        for operation, modules in zip(self.segment.operations, self.modules_of, strict=True):
            given = [
                each
                for each in operation.inputs
                if each.requires_grad and not isinstance(each, Parameter)
            ]
            for each in modules:
                module = self.modules[each]
                module.has_gradient |= not made[each].issuperset(given)
                made[each].update(operation.outputs)
        for name in self.segment.unhooked & self.names.keys():
            self.modules[self.names[name]].has_gradient = False

    def _look_at_reads(self) -> None:
        """What modules read of others by themselves; of one that is never called it is nobody's own."""
        named = {each.name: each for each in self.owners}
        for position, reader, weight in self.segment.reads:
            if weight not in named or not self.segment.sealed.isdisjoint(with_parents(reader)):
                continue
            number, place = self._number(reader), self._place(named[weight])
            module = self.modules[number]
            if place in module.weights:
                module.weights.remove(place)
            if place not in module.external:
                module.external.append(place)
                self.reads.setdefault(position, []).append((number, len(self.read)))
                self.read.append(place)

    def _look_inside(self) -> None:
        """What is in a module and in those within it; the layer's own name is empty."""
        for name, number in self.names.items():
            if name in (WHOLE_MODEL, BASE_MODEL):
                continue
            self.modules[number].inside = [
                self._place(each)
                for each, owner in self.owners.items()
                if not name or owner == name or owner.startswith(f"{name}.")
            ]

    def _leaves(self, operation: Operation) -> list[int]:
        if operation.tiles is None:
            return []
        called = [
            each for one in operation.tiles.segment.operations for each in self._modules_of(one)
        ]
        return [each for each in dict.fromkeys(called) if self.modules[each].weights]

    def _visits(self, position: int, *, back: bool) -> list[tuple[Act, int]]:
        """What tiles call before the last one does: forward, and with ``back`` backward too."""
        leaves = self.leaves[position]
        tiles = self.segment.operations[position].tiles
        if tiles is None or not leaves:
            return []
        forward = [act for each in leaves for act in ((Act.FETCH, each), (Act.RELEASE, each))]
        if not back:
            return (min(tiles.count, MAX_VISITS) - 1) * forward
        turned = [
            act for each in reversed(leaves) for act in ((Act.FETCH, each), (Act.RELEASE, each))
        ]
        return (min(tiles.count, MAX_VISITS) - 1) * [*forward, *turned] + forward

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
            number = self.names[name] = len(self.modules)
            self.modules.append(Module([]))
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
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for position, modules in enumerate(self.modules_of[: stop + cut]):
            for module in modules:
                call = self._call(module, position)
                first.setdefault(call, position)
                last[call] = position
        stops: dict[int, list[tuple[Act, int]]] = {}
        released: list[tuple[Act, int]] = []
        for position, modules in enumerate(self.modules_of[: stop + cut]):
            fetched = [*self.entered.get(position, ())]
            fetched += [each for each in modules if first[self._call(each, position)] == position]
            acts = [*released, *self._fetched(fetched, self.reads.get(position, ()))]
            acts += self._visits(position, back=False)
            if acts:
                stops[position] = acts
            closing = [each for each in modules if last[self._call(each, position)] == position]
            released = self._released(closing) if position < stop else []
        if not cut:
            released = [*released, *((Act.FETCH, each) for each in self.entered.get(stop, ()))]
        if released:
            stops[stop] = [*stops.get(stop, ()), *released]
        return stops

    def _fetched(
        self, modules: list[int], reads: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Act, int]]:
        """Modules that are called, and what one of them or of those around reads by itself before the others are."""
        readers = {reader for reader, _ in reads}
        first = max((at + 1 for at, each in enumerate(modules) if each in readers), default=0)
        yield from ((Act.FETCH, module) for module in modules[:first])
        yield from ((Act.READ, read) for _, read in reads)
        yield from ((Act.FETCH, module) for module in modules[first:])

    def _released(self, modules: list[int]) -> list[tuple[Act, int]]:
        """Let go of what these modules gathered; empty ones gathered nothing."""
        return [
            (Act.RELEASE, each)
            for each in modules
            if self.modules[each].weights or self.modules[each].external
        ]

    def _behind(self, modules: list[int], position: int) -> Iterator[tuple[Act, int]]:
        """What becomes of what these gathered for their backward pass."""
        for act, each in self._released(modules):
            is_last = self._call(each, position)[1] == len(self.calls.get(each, ()))
            yield (act if is_last else Act.PASS_BY), each

    def backward_stops(self) -> _BackwardStops:
        """What hooks do before and after each operation's backward pass."""
        operations = self.segment.operations
        first: dict[tuple[int, int], int] = {}
        final: dict[tuple[int, int], int] = {}
        order = [
            number for number in reversed(range(len(operations))) if operations[number].gradients
        ]
        for position in order:
            for module in self.modules_of[position]:
                call = self._call(module, position)
                first.setdefault(call, position)
                final[call] = position
        before: dict[int, list[tuple[Act, int]]] = {}
        after: dict[int, list[tuple[Act, int]]] = {}
        end: list[tuple[Act, int]] = []
        for position in order:
            modules = self.modules_of[position]
            fetched = [*self.left.get(position + 1, ())]
            fetched += [each for each in modules if first[self._call(each, position)] == position]
            acts = [(Act.FETCH, module) for module in fetched]
            acts += self._visits(position, back=True)
            if acts:
                before[position] = acts
            closing = [each for each in modules if final[self._call(each, position)] == position]
            delayed = [(Act.HAND_OVER, each) for each in closing if self.modules[each].delayed]
            if self.segment.compiled is not Compilation.NONE:
                # Its gradients are there when the graph returns.
                end += delayed
                delayed = []
            acts = [*delayed, *self._behind(closing, position)]
            if acts:
                after[position] = acts
        end += [(Act.FETCH, module) for module in self.left.get(0, ())]
        # Input embeddings that a gradient reaches, and no further: they go with the pass.
        end += self._released(self.left.get(0, []))
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
        """Those of what is run again: the layer's own hooks are outside of it.

        Tiles run without a graph that would hold what was gathered.
        """
        layer = self.names.get("")
        tiled = {each for leaves in self.leaves for each in leaves}

        def inside(act: Act, module: int) -> Act:
            return Act.DETACH if act == Act.RELEASE and module not in tiled else act

        return {
            position: [(inside(act, each), each) for act, each in acts if each != layer]
            for position, acts in stops.items()
        }


def with_parents(name: str) -> list[str]:
    """A module's name after those of the modules around it, the layer's own (empty) first.

    >>> with_parents("mlp.up_proj")
    ['', 'mlp', 'mlp.up_proj']
    """
    parts = name.split(".")
    return ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]
