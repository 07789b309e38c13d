"""A tape with a model's frames on it: who holds what, by name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol

from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation, Region, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.graph.modules.interpreter import check_interpreter
from memplan.graph.modules.layouts import Layouts
from memplan.graph.modules.loops import Loop, repeat, turns
from memplan.model.parameters import ModelPart

if TYPE_CHECKING:
    from memplan.model.layers import LayerSpec

_PASSING_ON = OperationKind.ADD, OperationKind.CLONE, OperationKind.CONTIGUOUS
"""What hands on the gradient that it is given, be it a view."""
check_once = cache(check_interpreter)


class Forgets(Protocol):
    """Takes the graph of the open segment back."""

    def forget(self) -> None:
        """Hold what it keeps."""


class Run(Tape):
    """A recording that counts the names of each storage.

    When Python drops the last one the storage dies there, unless an operation keeps it.
    """

    def __init__(self, options: TapeOptions, *, source: str) -> None:
        check_once()
        super().__init__(options, source=source)
        self.layers: Mapping[str, Sequence[LayerSpec]] = {}
        """By stack, what each layer is to the counts of FLOPs and times."""
        self.layouts = Layouts()
        """How what the open segment made hangs together in backward."""
        self.seen_as: list[Operation] = []
        """Views in the open segment whose gradients may be handed on to a sum of gradients."""
        self.parameters: dict[object, Parameter] = {}
        """What a weight of a module is on the tape, where a segment last declared it."""
        self.order: Mapping[object, int] = {}
        """Where constructors come to each weight."""
        self.names: dict[Storage, int] = {}
        """How many handles hold each storage."""
        self.loops: list[Loop] = []
        """Of the open segment, those of which some turns alone are recorded."""
        self.unread: Forgets | None = None
        """What forgets the graphs of segments whose results no loss reads; None: the open one's is read."""
        self._outliving: set[Storage] = set()
        self._emptied: set[Storage] = set()
        self._is_open = True
        self._is_over = False

    def lose(self, record: Tensor) -> None:
        """Its storage has no name left: it dies here, or is let go where an earlier segment made it."""
        storage = record.storage
        del self.names[storage]
        if self._is_over:
            return  # a class keeps names until the next tape is made of it
        if storage in self._emptied:
            self._emptied.remove(storage)
        elif storage.segment == self.segment.index:
            self.touch(record)
        elif storage in self._outliving:
            self._outliving.remove(storage)
            if self._is_open:
                self.release_here(record)
            else:
                self.release(record)
        elif self._is_open and storage in self.segment.given:
            self._touches += 1
            storage.touched = self._touches
            if self.segment.input is not None and storage is self.segment.input.storage:
                self.let_input_go()

    def empty(self, *records: Tensor) -> None:
        """Let storages go here whatever still names them (``untyped_storage().resize_(0)``)."""
        self.touch(*records)
        self._emptied |= {each.storage for each in records}

    def turns(self, count: int) -> Iterator[int]:
        """The numbers of a loop's turns that are recorded, where the others do the same; all, where hooks take what is
        kept, each by its own number."""
        if self.hooks is not None and not self.segment.checkpointed:
            return iter(range(count))
        return turns(count, lambda: (len(self.segment.operations), self._touches), self.loops)

    def place(self, weight: object, parameter: Parameter) -> None:
        """Note where a constructor comes to a parameter."""
        if weight in self.order:
            self.places[id(parameter)] = self.order[weight]

    def is_named(self, storage: Storage) -> bool:
        """Whether any name holds it."""
        return storage in self.names

    def outlive(self, storage: Storage) -> None:
        """Note that a name holds it beyond the segment that reads it."""
        if storage.segment >= 0 and not (storage.held or self._is_carried(storage)):
            storage.held = True
            self._outliving.add(storage)

    def _is_carried(self, storage: Storage) -> bool:
        """Whether a layer's repetitions hand it on, each to the next one."""
        return storage in self.segments[storage.segment].carried

    def start(
        self,
        name: str,
        x: Tensor | None,
        *,
        part: ModelPart,
        repeat: int = 1,
        checkpointed: bool = False,
        frozen: bool = False,
        again: Segment | None = None,
        further: Sequence[Tensor] = (),
    ) -> None:
        """End the open segment with ``x`` and begin one that reads it, and ``further`` streams beside it; what
        else has a name outlives it."""
        if self.segments and self.segment.output is None and x is not None:
            self.finish(x, further=further)
        read = {each.storage for each in (x, *further) if each is not None}
        for storage in self.names:
            if storage not in read:
                self.outlive(storage)
        self.begin(
            name,
            part=part,
            repeat=repeat,
            checkpointed=checkpointed,
            frozen=frozen,
            x=x,
            again=again,
            further=further,
        )
        self._is_open = True

    def finish(self, x: Tensor, *, further: Sequence[Tensor] = ()) -> None:
        """End the open segment with what it hands on."""
        views = self.layouts.settle()
        if views or self.seen_as:
            uses = _Uses(self.segment)
            views = [each for each in views if not uses.is_added_behind(each)]
            views += [each for each in self.seen_as if not uses.is_added_to(each)]
            self.seen_as.clear()
        seen = forget(self.segment, views, self.loops)
        while self.loops:
            loop = self.loops.pop()
            repeat(self.segment, loop)
            self._touches += loop.each * loop.more
        if self.unread is not None:
            self.unread.forget()
            if x.storage.segment == self.segment.index:
                x.requires_grad = False
        self.end(seen.get(x, x), [seen.get(each, each) for each in further])
        segment = self.segment
        last = len(segment.operations) - 1
        if segment.input_let_go == last:
            segment.input_let_go = None  # it stays to the end
        segment.released = {each: at for each, at in segment.released.items() if at != last}
        self._is_open = False

    @contextmanager
    def inside_tile(self) -> Iterator[None]:
        """What is recorded inside is a tile's, which holds what it was given to its end."""
        is_open, self._is_open = self._is_open, False
        yield
        self._is_open = is_open

    def close(self) -> None:
        """Forget names and modules: nothing is recorded any more."""
        self._is_open = False
        self._is_over = True
        self.parameters.clear()
        self.order = {}


class _Uses:
    """Who makes and who reads each tensor of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._given = segment.input
        self._makers: dict[Tensor, Operation] = {}
        self._readers: dict[Tensor, list[Operation]] = {}
        for each in segment.operations:
            for tensor in each.outputs:
                self._makers.setdefault(tensor, each)
            for tensor in dict.fromkeys(each.inputs):
                self._readers.setdefault(tensor, []).append(each)

    def is_added_to(self, view: Operation) -> bool:
        """Whether gradients are added up at a view, at what it shows, or at a part of the sum that this is, or
        may be where an earlier segment made it.

        The engine adds nothing in place to a gradient that is a view (``can_accumulate_inplace``).
        """
        (given,), (made,) = view.inputs, view.outputs
        if given is self._given:
            return True
        maker = self._makers.get(given)
        if len(self._read(made, but=maker)) > 1:
            return True
        if any(each is not view for each in self._read(given, but=maker)):
            return True
        return maker is not None and maker.kind is OperationKind.ADD and self._shares(maker)

    def is_added_behind(self, view: Operation) -> bool:
        """Whether gradients are added up at what was copied for a view, as ``reshape`` copies, or at a part of a sum."""
        (given,) = view.inputs
        maker = self._makers.get(given)
        return maker is not None and maker.kind in _PASSING_ON and self._shares(maker)

    def _shares(self, maker: Operation) -> bool:
        """Whether others read what it reads."""
        return any(self._read(tensor, but=maker) for tensor in maker.inputs)

    def _read(self, tensor: Tensor, *, but: Operation | None) -> list[Operation]:
        """Who reads it beside one."""
        return [each for each in self._readers.get(tensor, ()) if each is not but]


def forget(
    segment: Segment, views: Sequence[Operation], loops: Sequence[Loop] = ()
) -> dict[Tensor, Tensor]:
    """Take views off a segment that neither pass allocates anything for: who reads one reads its source.

    Returns what each of them is a view of.
    """
    if not views:
        return {}
    sources: dict[Tensor, Tensor] = {}
    gone = set(map(id, views))
    before: list[int] = []
    kept: list[Operation] = []
    for each in segment.operations:
        before.append(len(kept))
        if sources and not sources.keys().isdisjoint(each.inputs):
            each.inputs = tuple(sources.get(tensor, tensor) for tensor in each.inputs)
        if id(each) in gone:
            sources[each.outputs[0]] = each.inputs[0]
        else:
            kept.append(each)
    before.append(len(kept))
    for storage in {tensor.storage for each in kept for tensor in each.outputs}:
        if storage.segment == segment.index:
            storage.last_read = max(before[storage.last_read + 1] - 1, 0)
    segment.operations = kept
    segment.entered = [(before[position], name) for position, name in segment.entered]
    segment.left = [(before[position], name) for position, name in segment.left]
    segment.reads = [(before[position], who, what) for position, who, what in segment.reads]
    segment.spans = [(before[start], before[stop], name) for start, stop, name in segment.spans]
    segment.regions = [_moved(each, before, sources) for each in segment.regions]
    if segment.input_let_go is not None:
        segment.input_let_go = max(before[segment.input_let_go + 1] - 1, 0)
    segment.released = {
        each: max(before[position + 1] - 1, 0) for each, position in segment.released.items()
    }
    for loop in loops:
        loop.moved(before)
    return sources


def _moved(region: Region, before: Sequence[int], sources: Mapping[Tensor, Tensor]) -> Region:
    """A region among the operations that are left, and its result where that was a view."""
    return replace(
        region, start=before[region.start], stop=before[region.stop],
        rerun=None if region.rerun is None else before[region.rerun],
        result=None if region.result is None else sources.get(region.result, region.result),
    )  # fmt: skip
