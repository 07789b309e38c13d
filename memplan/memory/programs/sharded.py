"""What programs share whose parameters are gathered and reduced in units."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from memplan.graph.core.segments import Segment
from memplan.memory.account import ComponentKind
from memplan.memory.fsdp2.units import Unit, Units
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger


class Use(Protocol):
    """One unit's parameters: of a run of layers there are as many as layers."""

    @property
    def unit(self) -> Unit:
        """What it is one of."""

    @property
    def copy(self) -> int:
        """Which of them."""


UseT = TypeVar("UseT", bound=Use)


class FollowedUses(Generic[UseT]):
    """Uses one after another; what stands beside one is found at once: a model may have 60,000."""

    __slots__ = ("_positions", "_uses")

    def __init__(self, uses: Iterable[UseT] = ()) -> None:
        self._uses: list[UseT] = []
        self._positions: dict[int, int] = {}
        for use in uses:
            self.append(use)

    def append(self, use: UseT) -> None:
        """One more; one that was there before keeps the place that it had first."""
        self._positions.setdefault(id(use), len(self._uses))
        self._uses.append(use)

    def beside(self, use: UseT, steps: int) -> UseT | None:
        """What stands so many steps behind a use, before it where that is negative; None: nothing."""
        position = self._positions[id(use)] + steps
        return self._uses[position] if 0 <= position < len(self._uses) else None

    def clear(self) -> None:
        """Begin anew."""
        self._uses.clear()
        self._positions.clear()

    def __iter__(self) -> Iterator[UseT]:
        return iter(self._uses)

    def __bool__(self) -> bool:
        return bool(self._uses)


class ShardedProgram(Program, Generic[UseT]):
    """A rank whose parameters come in units: each layer, and what lies beside the layers."""

    weight_words: Mapping[ComponentKind, str] = {
        **Program.weight_words,
        ComponentKind.PARAMETERS: "the rank's shards",
    }

    num_steps = 4
    """Blocks of several streams take longer to find their places (15 recorded runs: four do)."""

    def __init__(
        self,
        given: RankInput,
        ledger: Ledger,
        units: Units,
        make_use: Callable[[Unit, int], UseT],
        *,
        workspace_bytes: int = 0,
    ) -> None:
        super().__init__(given, ledger, workspace_bytes=workspace_bytes)
        self.units = units
        self.singles = {id(unit): make_use(unit, 0) for unit in units.single()}
        self.root = self._single(units.root)
        self.root_waits = False
        """Its hook has not come by in this backward pass."""
        self.layers = {
            index: [make_use(unit, copy) for copy in range(unit.num_copies)]
            for index, unit in units.layers.items()
            if unit.parameters
        }
        self.beside = {
            index: [make_use(unit, copy) for copy in range(unit.num_copies)]
            for index, unit in units.beside.items()
        }
        self.uses_of_unit = {
            id(uses[0].unit): uses for uses in (*self.layers.values(), *self.beside.values())
        }
        self.order: FollowedUses[UseT] = FollowedUses()
        """Uses in the order in which their forward pass ended."""
        self.reduces = True
        """This micro-batch reduces its gradients."""

    def load_whole(self, weight: Weight, num_bytes: int, *, packs: bool) -> Block:
        """A weight as it lies on the GPU before it is sharded.

        One that is packed passes in full where the GPU ``packs``: where the model is loaded there.
        """
        how = self.given.tape.options.quantization
        kind = ComponentKind.GATHERED_PARAMETERS
        if how is None or weight[0].packed is None or how.prequantized or not packs:
            return self.ledger.allocate(num_bytes, 0, kind, weight)
        from memplan.memory.programs.loading.quantized import pack  # only then

        return pack(self.ledger, weight, how, kind)

    def _single(self, unit: Unit | None) -> UseT | None:
        return None if unit is None else self.singles.get(id(unit))

    def _layer_uses(self) -> Iterator[UseT]:
        for uses in (*self.layers.values(), *self.beside.values()):
            yield from uses

    def begin_backward(self) -> None:
        """The root's hook comes first, where the model itself returns the loss."""
        self.root_waits = self.root is not None
        if self.given.tape.returned_at is None:
            self._reach_root()

    def reach_model(self, segment: Segment) -> None:
        """Else with the gradient of what it returned, behind those of a trainer's own loss."""
        returned_at = self.given.tape.returned_at
        if self.root_waits and (returned_at is None or segment.index < returned_at):
            self._reach_root()

    def _reach_root(self) -> None:
        if self.root is not None:
            self._pre_backward(self.root)
        self.root_waits = False

    def _pre_backward(self, use: UseT) -> None:
        """The backward pass of a unit begins."""
        raise NotImplementedError

    def _uses(self) -> Iterator[UseT]:
        yield from self.singles.values()
        yield from self._layer_uses()

    def _uses_in(self, segment: Segment, repetition: int) -> list[UseT]:
        """The layer's own use, and that of what is trained in it."""
        found = []
        for table in (self.layers, self.beside):
            uses = table.get(segment.index)
            if uses is not None:
                found.append(uses[repetition % len(uses)])
        return found

    def _layer(self, segment: Segment, repetition: int) -> UseT | None:
        uses = self.layers.get(segment.index)
        return None if uses is None else uses[repetition % len(uses)]

    def _use_of(self, weight: Weight) -> UseT:
        """The use that owns a weight."""
        parameter, copy = weight
        unit = id(self.units.of_parameter[parameter])
        single = self.singles.get(unit)
        return self.uses_of_unit[unit][copy] if single is None else single

    def _owns(self, use: UseT, segment: Segment) -> bool:
        return any(self.units.of_parameter[each] is use.unit for each in segment.parameters)

    @cached_property
    def positions(self) -> dict[Weight, int]:
        """Where each weight stands among all."""
        return {weight: position for position, weight in enumerate(self.weights)}
