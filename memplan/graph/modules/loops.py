"""Loops whose turns all do the same: some are recorded, and the others are written down after one of them.

A turn reads what the one before it made and what stood before the loop. The first turns and the last ones differ (there is
no state yet, or nothing reads it); those between are equal, up to whose tensors they read. ``turns`` runs a loop's body for
the ones that are recorded, and ``repeat`` writes the rest down once a segment's views are settled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from memplan.fast_dataclass import dataclass
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tensors import Storage, Tensor

FIRST = 3
"""Turns that are recorded first; the last of them stands for those that are not."""
LAST = 3
"""Turns that are recorded behind those."""
Place = tuple[int, int]
"""How many operations a segment has, and how often variables were let go."""


@dataclass(slots=True)
class Loop:
    """Where the turn that stands for others was recorded."""

    before: int
    """The first operation of the turn before it."""
    start: int
    stop: int
    """One past its last operation."""
    more: int
    """How many turns it stands for beside itself."""
    touches: int
    """When it was over, and how often variables were let go in it."""
    each: int

    def moved(self, places: Sequence[int]) -> None:
        """Note where its operations stand once others are gone."""
        self.before, self.start, self.stop = (
            places[each] for each in (self.before, self.start, self.stop)
        )


def turns(count: int, place: Callable[[], Place], noted: list[Loop]) -> Iterator[int]:
    """The numbers of the turns to record; ``place`` is where the recording stands, and ``noted`` takes the loop down."""
    if count <= FIRST + LAST:
        yield from range(count)
        return
    places: list[Place] = []
    for number in range(FIRST):
        places.append(place())
        yield number
    (before, _), (start, begun), (stop, touches) = places[-2], places[-1], place()
    noted.append(Loop(before, start, stop, count - FIRST - LAST, touches, touches - begun))
    yield from range(count - LAST, count)


def repeat(segment: Segment, loop: Loop) -> None:
    """Write the turns down that one stands for, and move what comes behind them."""
    operations = segment.operations
    before = operations[loop.before : loop.start]
    whole = operations[loop.start : loop.stop]
    rest = operations[loop.stop :]
    earlier = {each.storage for each in _outputs(operations[: loop.start])}
    own = dict.fromkeys(each.storage for each in _outputs(whole) if each.storage not in earlier)
    _move(segment, loop, [*operations[: loop.start], *rest], own)
    turn = _Turn(before, whole, own)
    copies: list[Operation] = []
    for number in range(1, loop.more + 1):
        copies += turn.next(number * len(whole), number * loop.each)
    turn.hand_over(rest)
    segment.operations = [*operations[: loop.stop], *copies, *rest]


class _Turn:
    """A turn that is written down again and again, each time behind the one before."""

    def __init__(
        self, before: Sequence[Operation], whole: Sequence[Operation], own: Iterable[Storage]
    ) -> None:
        self._whole = whole
        self._own = own
        self._given = [*_outputs(before)]
        """What the turn before made: what of it is read is read of the latest one."""
        self._made = [*_outputs(whole)]
        self._latest = self._made
        assert len(self._given) == len(self._made)

    def next(self, positions: int, touches: int) -> list[Operation]:
        """Another one, so many operations further on."""
        storages = {
            given.storage: latest.storage
            for given, latest in zip(self._given, self._latest, strict=True)
        }
        tensors = dict(zip(self._given, self._latest, strict=True))
        for each in self._own:
            storages[each] = _later(each, positions, touches)
        made = [_on(each, storages) for each in self._made]
        tensors |= zip(self._made, made, strict=True)
        self._latest = made
        return [_again(each, tensors, storages) for each in self._whole]

    def hand_over(self, operations: Iterable[Operation]) -> None:
        """Have those behind them read the latest of what they read of the turn that stands for them."""
        pairs = [*zip(self._made, self._latest, strict=True)]
        tensors = dict(pairs)
        storages = {one.storage: other.storage for one, other in pairs}
        for each in operations:
            each.inputs = tuple([tensors.get(tensor, tensor) for tensor in each.inputs])
            each.saved = [storages.get(storage, storage) for storage in each.saved]
            each.pinned = [storages.get(storage, storage) for storage in each.pinned]
            for made in each.outputs:  # views of what the latest made
                made.storage = storages.get(made.storage, made.storage)


def _outputs(operations: Iterable[Operation]) -> Iterator[Tensor]:
    return (tensor for each in operations for tensor in each.outputs)


def _later(storage: Storage, positions: int, touches: int) -> Storage:
    made = Storage(storage.num_bytes, storage.segment, storage.last_read + positions)
    made.touched = storage.touched and storage.touched + touches
    made.held, made.weight_cast = storage.held, storage.weight_cast
    return made


def _on(tensor: Tensor, storages: dict[Storage, Storage]) -> Tensor:
    storage = storages.get(tensor.storage, tensor.storage)
    made = Tensor(tensor.numel, tensor.dtype, storage, requires_grad=tensor.requires_grad)
    made.by_channel, made.by_column = tensor.by_channel, tensor.by_column
    made.by_head, made.is_flat = tensor.by_head, tensor.is_flat
    return made


def _again(
    operation: Operation, tensors: dict[Tensor, Tensor], storages: dict[Storage, Storage]
) -> Operation:
    """The operation with others in the place of what it reads, makes and keeps."""
    of, pinned = operation, operation.pinned
    return Operation(
        of.kind, tuple([tensors.get(each, each) for each in of.inputs]),
        tuple([tensors[each] for each in of.outputs]),
        [storages.get(each, each) for each in of.saved], of.gradients,
        forward_scratch=of.forward_scratch, backward_scratch=of.backward_scratch, flops=of.flops,
        keeps_weight=of.keeps_weight, saves_output=of.saves_output, in_python=of.in_python,
        pinned=[storages.get(each, each) for each in pinned] if pinned else pinned,
        outside=of.outside, tiles=of.tiles, sends=of.sends,
    )  # fmt: skip


def _move(
    segment: Segment, loop: Loop, others: Sequence[Operation], own: Iterable[Storage]
) -> None:
    """Places and times behind the loop's turn, by so much as is written down there."""
    size, stop = (loop.stop - loop.start) * loop.more, loop.stop
    kept = {*own}
    storages = {each.storage for each in _outputs(others)} | {*segment.given, *segment.released}
    for each in storages - kept:
        if each.touched > loop.touches:
            each.touched += loop.each * loop.more
        if each.segment == segment.index and each.last_read >= stop:
            each.last_read += size
    segment.entered = [(at + size * (at >= stop), name) for at, name in segment.entered]
    segment.left = [(at + size * (at >= stop), name) for at, name in segment.left]
    segment.reads = [(at + size * (at >= stop), who, what) for at, who, what in segment.reads]
    assert not segment.regions, "attention that is run again, in a layer that has turns"
    if segment.input_let_go is not None and segment.input_let_go >= stop:
        segment.input_let_go += size
    segment.released = {each: at + size * (at >= stop) for each, at in segment.released.items()}
