"""A played run of which every block has a name: what it is for, and where in the model it was made.

A plain ``Ledger`` notes neither, for the sake of speed. ``NamedLedger`` keeps what programs say with an
allocation, and the walk's key where a walk made it; ``block_labels`` turns both into words.
"""

from collections.abc import Callable, Iterable, Iterator

from memplan.fast_dataclass import dataclass
from memplan.graph.core.segments import Operation, Segment, SegmentComponent
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage
from memplan.memory.account import ComponentKind
from memplan.memory.passes import StepPasses
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.memory.walks.walk import WORKSPACE, Event


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a run is, from an event on."""

    start: int
    part: Part
    step: int
    """Which step, from 0 on."""
    segment: Segment | None = None
    """The segment of the model that runs; None: none does."""
    repetition: int = 0

    @property
    def place(self) -> str:
        """The layer that runs, as ``named_parameters()`` begins; empty where none does."""
        if self.segment is None:
            return ""
        return segment_name(self.segment, self.repetition)


class NamedLedger(Ledger):
    """A ledger that notes what every block is for."""

    __slots__ = ("keys", "said", "stretches")

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[Stretch] = []
        """The parts of the run and the segments in them, in order."""
        self.said: dict[Block, tuple[ComponentKind, object]] = {}
        """What programs said of their own blocks."""
        self.keys: dict[Block, object] = {}
        """Keys of blocks that walks made."""

    def enter(self, part: Part, step: int = 0) -> None:
        """A part of the run begins."""
        self.stretches.append(Stretch(len(self.events), part, step))

    def recurs(self) -> bool:
        """No: each block has a name of its own."""
        return False

    @property
    def repeats(self) -> bool:
        """No, for the same reason."""
        return False

    def reach(self, segment: Segment, repetition: int) -> None:
        """A segment of the model is reached."""
        last = self.stretches[-1]
        self.stretches.append(Stretch(len(self.events), last.part, last.step, segment, repetition))

    def frame(self) -> dict[object, Block]:
        """A mapping that notes the first key of every block."""
        return _NotingFrame(self.keys)

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block, and note what it is for."""
        block = super().allocate(num_bytes, stream)
        if kind is not None:
            self.said[block] = kind, name
        return block


class _NotingFrame(dict[object, Block]):
    __slots__ = ("keys_of",)

    def __init__(self, keys_of: dict[Block, object]) -> None:
        super().__init__()
        self.keys_of = keys_of

    def __setitem__(self, key: object, block: Block) -> None:
        super().__setitem__(key, block)
        self.keys_of.setdefault(block, key)


@dataclass(frozen=True, slots=True)
class Label:
    """What a block is for, and where it was made."""

    kind: ComponentKind
    name: str
    """An operation and its module, a parameter, or an engine's buffer."""
    place: str
    """The layer that ran, or whose parameter it is; empty where none did."""
    position: int
    """Which operation of the layer; 0 where it was none."""
    part: Part
    step: int


@dataclass(kw_only=True, slots=True)
class NamedRun:
    """A run played out, with a name for each of its blocks."""

    ledger: NamedLedger
    name_blocks: Callable[[], dict[Block, Label]]
    _labels: dict[Block, Label] | None = None

    @property
    def labels(self) -> dict[Block, Label]:
        """The names, which take as long as the run: found when somebody reads them."""
        if self._labels is None:
            self._labels = self.name_blocks()
        return self._labels


def play_named(given: RankInput, *, workspace_bytes: int, rank: int = 0) -> NamedRun:
    """Play a rank's run, naming every block."""
    ledger = NamedLedger()
    program = program_of(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    program.run()
    others = [(each.tape, each.passes) for each in given.beside.models]
    others += [(each.tape, each.passes) for each in given.stages]
    return NamedRun(
        ledger=ledger,
        name_blocks=lambda: block_labels(ledger, given.tape, given.passes, others),
    )


def block_labels(
    ledger: NamedLedger,
    tape: Tape,
    passes: StepPasses,
    others: Iterable[tuple[Tape, StepPasses]] = (),
) -> dict[Block, Label]:
    """A label for every block of a run; ``others`` are models beside the trained one."""
    index = _KeyIndex(tape, passes)
    for other_tape, other_passes in others:
        index.add(other_tape, other_passes)
    tapes = [tape, *(each for each, _ in others)]
    owners = {
        parameter: segment
        for each in tapes
        for segment in each.segments
        for parameter in segment.parameters
    }
    found: dict[Block, Label] = {}
    for block, stretch in _placed(ledger):
        place, position = stretch.place, 0
        said = ledger.said.get(block)
        if said is None:
            kind, name, position = index.describe(ledger.keys.get(block))
        else:
            kind, name = said[0], str(said[1])
            match said[1]:
                case (Parameter() as parameter, int(copy)):
                    place, name = segment_name(owners[parameter], copy), parameter.name
                case _:
                    pass
        found[block] = Label(
            kind=kind, name=name, place=place, position=position,
            part=stretch.part, step=stretch.step,
        )  # fmt: skip
    return found


def _placed(ledger: NamedLedger) -> Iterator[tuple[Block, Stretch]]:
    """Every block, and the stretch that made it."""
    stretches = ledger.stretches
    ends = [*(stretch.start for stretch in stretches[1:]), len(ledger.events)]
    for stretch, end in zip(stretches, ends, strict=True):
        for number in range(stretch.start, end):
            if ledger.events[number] > 0:
                yield number, stretch


def segment_name(segment: Segment, repetition: int) -> str:
    """A segment's name, one layer of a stack with its number.

    >>> from memplan.model.parameters import ModelPart
    >>> layers = {"repeat": 4, "checkpointed": False, "part": ModelPart.LAYERS}
    >>> segment_name(Segment("decoder.layers", 1, **layers), 2)
    'decoder.layers.2'
    """
    return f"{segment.name}.{repetition}" if segment.is_layer else segment.name


class _KeyIndex:
    """What walks' keys stand for."""

    def __init__(self, tape: Tape, passes: StepPasses) -> None:
        self.makers: dict[object, tuple[Operation, str]] = {}
        """The operation that asked for a block, and a word on what it is to it."""
        self.kinds: dict[object, ComponentKind] = {}
        self.names: dict[Operation, str] = {}
        self.positions: dict[Operation, int] = {}
        self.heads: set[Operation] = set()
        self.add(tape, passes)

    def add(self, tape: Tape, passes: StepPasses) -> None:
        """Another model's too."""
        kept = {
            storage
            for segment in tape.segments
            for operation in segment.operations
            for storage in operation.held
        }
        modules: dict[Storage, str] = {}
        for segment in tape.segments:
            for position, operation in enumerate(segment.operations):
                self.positions[operation] = position
                self.names[operation] = operation_name(operation, modules)
                if segment.component is SegmentComponent.LOGITS_AND_LOSS:
                    self.heads.add(operation)
                for tensor in operation.outputs:
                    storage = tensor.storage
                    if storage not in self.makers:
                        self.makers[storage] = operation, ""
                        if storage in kept or storage in segment.kept_outputs:
                            self.kinds[storage] = ComponentKind.ACTIVATIONS
        for forward in passes.forward:
            marks = [(start, ~position) for position, start in enumerate(forward.profile.starts)]
            self._note(forward.segment, forward.profile.events, marks[:-1])
        for each in passes.backward:
            present = 0
            for interval in each.intervals:
                # The operation that a finished gradient interrupted goes on.
                marks = [(0, present), *interval.marks]
                self._note(each.segment, interval.events, marks)
                present = next((mark for _, mark in reversed(marks) if mark >= 0), present)
                if interval.gradient is not None:
                    self.kinds[interval.gradient] = ComponentKind.GRADIENTS

    def _note(self, segment: Segment, events: list[Event], marks: list[tuple[int, int]]) -> None:
        """Note whose the keys are: a mark is an operation's position, ``~position`` if forward."""
        if not marks:
            return
        ends = [*(start for start, _ in marks[1:]), len(events)]
        for (start, mark), end in zip(marks, ends, strict=True):
            position, word = (mark, "backward of ") if mark >= 0 else (~mark, "scratch of ")
            if start == end or position >= len(segment.operations):
                continue
            made = segment.operations[position], word
            for key, size in events[start:end]:
                if size and key is not WORKSPACE:
                    self.makers.setdefault(key, made)

    def describe(self, key: object) -> tuple[ComponentKind, str, int]:
        """What a key's block is for, in a word, and the position of its operation."""
        made = self.makers.get(key)
        if made is None:
            return ComponentKind.TEMPORARIES, "engine", 0
        operation, word = made
        kind = self.kinds.get(key, ComponentKind.TEMPORARIES)
        if operation in self.heads and kind is not ComponentKind.GRADIENTS:
            kind = ComponentKind.LOGITS_AND_LOSS
        return kind, word + self.names[operation], self.positions[operation]


def operation_name(operation: Operation, modules: dict[Storage, str]) -> str:
    """An operation with the module whose weight it takes.

    ``modules`` says whose cast a storage is, and takes up what the operation casts.

    >>> operation_name(Operation("add", (), (), (), ()), {})
    'add'
    """
    owners = [
        tensor.module if isinstance(tensor, Parameter) else modules.get(tensor.storage)
        for tensor in operation.inputs
    ]
    owner = next((each for each in owners if each is not None), None)
    if owner is None:
        return operation.name
    for tensor in operation.outputs:
        if tensor.storage.weight_cast:
            modules[tensor.storage] = owner
    return f"{operation.name} {owner}"
