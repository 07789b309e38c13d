"""Long loops over tokens: written down as a few turns, one of which stands for many.

A loop over every token of a sequence keeps the same few tensors each time. All that its middle turns
keep is kept at once when the backward pass begins, which is when most is alive; what one of them
makes and drops is there once. So one turn is recorded for all of them, and what it keeps is as large
as what they all keep.
"""

from collections.abc import Iterator, Mapping

from memplan.fast_dataclass import dataclass
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import SMALL_REQUEST_BYTES, Storage, Tensor

EXACT_TURNS = 64
"""Loops of up to so many turns are written down turn by turn."""
EXACT_IN_LAYERS = 1024
"""The same where a segment's repetitions have no more together, about a second's work. Of longer loops what is requested
is as exact, but many small tensors that are one large one here lie elsewhere in the allocator's segments: reserved by up to
1.7 % and the least capacity by 7.7 % off in RWKV's runs of 768 and 1,024 tokens, and by nothing with every turn written down."""
LAST_TURNS = 2
"""So many are written down at the end: gradients of what all turns read are added from the second
one of the backward pass on."""


@dataclass(slots=True)
class Turn:
    """One recorded turn of a loop."""

    count: int
    """How many it stands for."""
    is_first: bool
    is_last: bool


class Turns:
    """The turns of a loop as they are recorded.

    >>> from memplan.graph.core.options import TapeOptions
    >>> [turn.count for turn in Turns(Tape(TapeOptions()), 4096)]
    [1, 4093, 1, 1]
    """

    def __init__(self, t: Tape, count: int) -> None:
        self.tape = t
        self.total = count
        self.collected: list[Tensor] = []
        """What every turn adds to a list."""
        self._many: list[tuple[int, range]] = []

    def __iter__(self) -> Iterator[Turn]:
        """Yield the turns to record, and note which operations stand for many."""
        operations = self.tape.segment.operations
        counts = _counts(self.total, self.tape.segment.repeat)
        for number, count in enumerate(counts):
            start = len(operations)
            yield Turn(count, is_first=not number, is_last=number == len(counts) - 1)
            if count > 1:
                self._many.append((count, range(start, len(operations))))

    def collect(self, tensor: Tensor, turn: Turn) -> None:
        """Add a turn's result to a list that lives as long as the loop: as large as all it stands for."""
        tensor.storage.num_bytes *= turn.count
        self.collected.append(tensor)

    def close(self) -> None:
        """Let what stands for many turns be as large as what they keep; nothing is recorded after it."""
        operations = self.tape.segment.operations
        kept = {storage for each in operations for storage in each.saved}
        listed = {each.storage for each in self.collected}
        pieces: dict[Storage, list[Tensor]] = {}
        for count, places in self._many:
            for place in places:
                operations[place].flops *= count
                operations[place].turns = count
                read = {tensor.storage for tensor in operations[place].inputs}
                for tensor in operations[place].outputs:
                    storage = tensor.storage
                    if storage not in read and storage in kept and storage not in listed:
                        pieces[storage] = _pieces(tensor, count)
        for operation in operations if pieces else ():
            _add_pieces(operation, pieces)


def _pieces(made: Tensor, count: int) -> list[Tensor]:
    """Let a turn's tensor be the first piece of those of so many turns; returns the others.

    Small blocks lie in segments of their own, which nothing large is put into: a piece is as large as still lies there.
    """
    each = made.storage
    turns = max(1, SMALL_REQUEST_BYTES // each.num_bytes) if each.num_bytes else count
    if each.num_bytes > SMALL_REQUEST_BYTES:
        turns = count
    sizes = [min(turns, count - done) for done in range(0, count, turns)]
    own, numel = each.num_bytes, made.numel
    each.num_bytes = own * sizes[0]
    return [_beside(made, numel * size, own * size) for size in sizes[1:]]


def _beside(made: Tensor, numel: int, num_bytes: int) -> Tensor:
    """Another tensor that lives as long as one."""
    first = made.storage
    storage = Storage(num_bytes, first.segment, first.last_read)
    storage.kept_by_maker, storage.touched = first.kept_by_maker, first.touched
    return Tensor(numel, made.dtype, storage, requires_grad=made.requires_grad)


def _add_pieces(operation: Operation, pieces: Mapping[Storage, list[Tensor]]) -> None:
    """Have an operation make all pieces of what it makes, and keep those of what it keeps."""
    more = [each for made in operation.outputs for each in pieces.get(made.storage, ())]
    if more:
        operation.outputs = (*operation.outputs, *more)
    kept = [each.storage for storage in operation.saved for each in pieces.get(storage, ())]
    if kept:
        operation.saved = (*operation.saved, *kept)


def _counts(total: int, repetitions: int) -> list[int]:
    if total <= EXACT_TURNS or total * repetitions <= EXACT_IN_LAYERS:
        return [1] * total
    return [1, total - 1 - LAST_TURNS, *(1,) * LAST_TURNS]
