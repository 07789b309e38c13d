"""Walking a segment of the tape forward: what it leaves alive, and how high it rises on the way.

A tensor dies when nothing later reads it and no operation keeps it. A profile is relative to the bytes
alive when the segment begins, so equal layers are walked once and repeated by arithmetic.
"""

from collections.abc import Collection, Sequence

from memplan.fast_dataclass import dataclass
from memplan.graph.core.segments import (
    Change,
    Operation,
    Segment,
    scratch_changes,
)
from memplan.graph.core.tensors import Storage
from memplan.training.compilation import Compilation


@dataclass(slots=True)
class Level:
    """Bytes alive at one moment, relative to where a walk began, parameters' gradients left out."""

    saved_bytes: int = 0
    """Kept for the backward pass."""
    other_bytes: int = 0
    """Everything else: outputs, temporaries, gradients on their way."""
    earlier_bytes: int = 0
    """Kept by this segment, made by earlier ones: a backward pass lets it go."""
    passed_bytes: int = 0
    """Gradients that wait for earlier segments when a backward pass ends, less those it was given."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.saved_bytes + self.other_bytes + self.earlier_bytes + self.passed_bytes


Event = tuple[object, int]
"""What a walk asks of the allocator: a key and the bytes to allocate for it, or 0 to free it."""

WORKSPACE = object()
"""The key of an event that allocates nothing but cuBLAS's workspace, where a thread's first product of
matrices asks for it (aten/src/ATen/cuda/CublasHandlePool.cpp, ``getCUDABlasLtWorkspace``)."""


class InTransit:
    """A block that is on its way to CPU RAM or back: a key of a walk's events."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


@dataclass(slots=True)
class ForwardProfile:
    """A segment's forward pass."""

    peak: Level
    end: Level
    """What it leaves alive, its output and its cached weight casts included."""
    input_freed: bool
    """Nothing of this segment keeps its input, which then dies at the segment's end or before; ``end``
    counts it still."""
    further_freed: Sequence[Storage]
    """Its further inputs of which the same is true."""
    cached_cast_bytes: int
    """Weight casts that only autocast's cache still holds when the segment ends."""
    events: list[Event]
    """Allocations and frees, in torch's order."""
    starts: list[int]
    """How many of them come before each operation, and before the end."""
    arriving: Sequence[object] = ()
    """Keys of what was on its way to CPU RAM when it began."""
    leaving: Sequence[object] = ()
    """Keys of what is when it ends, and nothing else holds."""
    released: frozenset[Storage] = frozenset()
    """What earlier segments made and variables let go of amid this one; ``end`` counts it still."""


class ForwardWalk:
    """Forward over one segment, keeping what backward needs, or (checkpointed) little or nothing.

    ``saves`` counts, for each storage that stays, the operations that keep it; ``released`` are those of
    ``Segment.released`` that nothing else holds.
    """

    def __init__(
        self, segment: Segment, *, keep: bool, released: frozenset[Storage] = frozenset()
    ) -> None:
        self.segment = segment
        self.released = released
        self.saves: dict[Storage, int] = {}
        if keep:
            for operation in segment.operations:
                # What is pinned waits for one more than will ever let it go.
                held = operation.saved if segment.checkpointed else operation.held
                for storage in held:
                    self.saves[storage] = self.saves.get(storage, 0) + 1
            for storage in (*_held_by_nested(segment), *segment.graph_held):
                self.saves[storage] = self.saves.get(storage, 0) + 1

    def run(self) -> ForwardProfile:
        """Walk all operations, as the forward pass does."""
        kept = self.saves
        if self.segment.checkpointed:
            segment = self.segment
            kept = dict.fromkeys(segment.kept_outputs | segment.handed_in | segment.pinned, 1)
        elif self.segment.regions:
            kept = self._outside_regions()
        return self._walk(
            self.segment.operations, kept, present=frozenset(), released=self.released
        )

    def recompute(self) -> ForwardProfile:
        """Walk again what a checkpointed segment runs in its backward pass.

        What policy kept in the first pass is there already; what only the second pass reads of it
        is let go. Nothing but what backward needs is alive at the end.
        """
        present = self.segment.kept_outputs | self.segment.handed_in
        operations = self.segment.operations
        if not self.segment.kept_outputs:
            operations = operations[: recomputation_stop(self.segment)]
        profile = self._walk(operations, self.saves, present=present)
        made = [each.storage for operation in operations for each in operation.outputs]
        turn = {storage: number for number, storage in enumerate(made)}
        spent = [storage for storage in present if storage not in self.saves]
        spent.sort(key=lambda each: turn.get(each, -1))  # a set's own order is another each time
        kept_bytes = profile.end.saved_bytes - sum(storage.num_bytes for storage in spent)
        profile.end = Level(saved_bytes=kept_bytes)
        alive = dict.fromkeys(key for key, size in profile.events if size)
        for key, size in profile.events:
            if not size and key is not WORKSPACE:
                alive.pop(key, None)  # what a fused kernel never writes has no bytes
        profile.events += [(key, 0) for key in (*alive, *spent) if key not in self.saves]
        return profile

    def _outside_regions(self) -> dict[Storage, int]:
        """What stays in the first pass where regions are recomputed on their own."""
        dropped = {storage for region in self.segment.regions for storage in region.dropped}
        return {storage: count for storage, count in self.saves.items() if storage not in dropped}

    def _walk(
        self,
        operations: Sequence[Operation],
        saves: dict[Storage, int],
        *,
        present: frozenset[Storage],
        released: frozenset[Storage] = frozenset(),
    ) -> ForwardProfile:
        segment = self.segment
        index = segment.index
        returned = segment.returned
        dying: dict[int, list[Storage]] = {}
        live = saved = peak = peak_saved = cached = gone = peak_gone = 0
        given = segment.input.storage if segment.input is not None else None
        # What only passes through goes on as the output.
        passes = segment.output is not None and segment.output.storage is given
        input_freed = given is not None and given not in saves and not passes
        if input_freed and given is not None and segment.input_let_go is not None:
            dying[segment.input_let_go] = [given]
        for storage in released:
            dying.setdefault(segment.released[storage], []).append(storage)
        events: list[Event] = []
        starts: list[int] = []
        for position, operation in enumerate(operations):
            starts.append(len(events))
            highest = 0
            after: Sequence[Change] = ()
            between: list[Sequence[Change]] = []
            if operation.forward_scratch or operation.tiles is not None:
                before, *between, after = forward_stages(operation)
                highest = live + _played(events, before)
                live += sum(size for _, size in before)
                if highest > peak:
                    peak, peak_saved, peak_gone = highest, saved, gone
            for tensor in operation.outputs:
                storage = tensor.storage
                if (
                    storage.segment == index
                    and not (present and storage in present)
                    and not _is_alias(operation, storage)
                ):
                    size = storage.num_bytes
                    live += size
                    events.append((storage, size))
                    if storage in saves:
                        saved += size
                    elif storage.weight_cast:
                        cached += size
                    elif storage not in returned and not storage.held:
                        last = storage.last_read
                        if last > position:
                            dying.setdefault(last, []).append(storage)
                        else:
                            # What nothing reads dies in the kernel, before any variable.
                            dying.setdefault(position, []).insert(0, storage)
                if between:
                    change = between.pop(0)
                    highest = max(highest, live, live + _played(events, change))
                    live += sum(size for _, size in change)
            if operation.multiplies and (not events or events[-1][0] is not WORKSPACE):
                events.append((WORKSPACE, 0))
            if live > highest:  # noqa: PLR1730
                highest = live
            if after:
                highest = max(highest, live + _played(events, after))
                live += sum(size for _, size in after)
            if highest > peak:
                peak, peak_saved, peak_gone = highest, saved, gone
            ending = dying.get(position, ())
            if len(ending) > 1:
                ending = sorted(ending, key=_touched)
            for storage in ending:
                live -= storage.num_bytes
                events.append((storage, 0))
                if storage.segment != index:
                    gone += storage.num_bytes
        starts.append(len(events))
        return ForwardProfile(
            peak=Level(
                saved_bytes=peak_saved,
                other_bytes=peak - peak_saved + peak_gone,
                earlier_bytes=-peak_gone,
            ),
            end=Level(saved_bytes=saved, other_bytes=live + gone - saved),
            input_freed=input_freed,
            further_freed=further_freed(segment, saves),
            cached_cast_bytes=cached,
            events=events,
            starts=starts,
            released=released,
        )


def further_freed(segment: Segment, kept: Collection[Storage]) -> list[Storage]:
    """Of a segment's further inputs those that die at its end, where it keeps no more than this."""
    if segment.checkpointed:
        return []
    return [each.storage for each in segment.further_inputs if each.storage not in kept]


def forward_stages(operation: Operation) -> Sequence[Sequence[Change]]:
    """What comes and goes before an operation's results are there, and behind them."""
    if operation.tiles is not None:
        return operation.tiles.forward
    return scratch_changes(operation.forward_scratch)


def _held_by_nested(segment: Segment) -> list[Storage]:
    """What stays for, or during, a backward pass within the backward pass."""
    held = [storage for region in segment.regions for storage in region.given]
    output = segment.output
    if segment.nested and output is not None and output.storage.segment == segment.index:
        held.append(output.storage)
    return held


def _touched(storage: Storage) -> int:
    return storage.touched


def _played(events: list[Event], changes: Sequence[Change]) -> int:
    """Note what a kernel asks for beside its results; return the most that it adds [bytes]."""
    live = highest = 0
    for key, size in changes:
        live += size
        highest = max(highest, live)
        events.append((key, max(size, 0)))
    return highest


def _is_alias(operation: Operation, storage: Storage) -> bool:
    for tensor in operation.inputs:  # noqa: SIM110  (asked of every output, in half the time)
        if tensor.storage is storage:
            return True
    return False


def last_recomputed(segment: Segment) -> int:
    """The operation of a checkpointed segment at which running it again is broken off.

    torch stops at the last tensor to be kept (``set_checkpoint_early_stop``, on by default).
    """
    for position in range(len(segment.operations) - 1, -1, -1):
        if keeps_something(segment.operations[position]):
            return position
    return 0


def recomputation_stop(segment: Segment) -> int:
    """How many operations a checkpointed segment runs again before everything kept is there.

    An operation that keeps only inputs is not run itself. What is compiled or nested runs as a whole.
    """
    if segment.compiled is not Compilation.NONE or segment.nested:
        return len(segment.operations)
    last = last_recomputed(segment)
    keeps = bool(segment.operations) and keeps_something(segment.operations[last])
    return last + (keeps and segment.operations[last].saves_output)


def keeps_something(operation: Operation) -> bool:
    """Whether it keeps something for its backward formula, be it a weight."""
    return operation.keeps
