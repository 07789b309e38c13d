"""Walking a segment of the tape: what it leaves alive, and how high it rises on the way.

Forward, a tensor dies when nothing later reads it and no operation keeps it. Backward, the
operations run in reverse; each one makes the gradients of its inputs while its own output's
gradient and everything it kept are still alive, then lets both go. That is the order of torch's
autograd engine (torch/csrc/autograd/engine.cpp: ``evaluate_function`` calls the node, validates its
outputs, releases its saved variables, then adds the outputs to the next nodes' buffers).

A profile is relative to the bytes alive when the segment begins, so equal layers are walked once and
repeated by arithmetic.
"""

from collections.abc import Sequence

from memplan.graph.segments import Gradient, Operation, Region, Segment
from memplan.graph.tensors import Parameter, Storage, Tensor
from memplan.records import dataclass


@dataclass(slots=True)
class Level:
    """Bytes alive at one moment, relative to where a walk began, parameters' gradients left out."""

    saved_bytes: int = 0
    """Kept for the backward pass."""
    other_bytes: int = 0
    """Everything else: outputs, temporaries, gradients on their way."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.saved_bytes + self.other_bytes


@dataclass(slots=True)
class ForwardProfile:
    """A segment's forward pass."""

    peak: Level
    end: Level
    """What it leaves alive, its output and its cached weight casts included."""
    input_freed: bool
    """Nothing of this segment keeps its input, which then dies at the segment's end."""
    cached_cast_bytes: int
    """Weight casts that only autocast's cache still holds when the segment ends."""
    levels: list[tuple[int, int]]
    """For each operation, the bytes alive while it runs and after it."""


@dataclass(slots=True)
class Station:
    """A point of a backward walk at which a module's backward pass begins, as far as hooks can tell.

    That is before an operation with weights, or before the one that made a module's output.
    """

    position: int
    """The operation that runs next."""
    peak_bytes: int
    """The highest level since the station before, or since the interval began."""
    level_bytes: int
    """What is alive here."""


@dataclass(slots=True)
class Interval:
    """Backward between two parameters' gradients, and the gradient that ends it.

    What happens to a finished gradient is the engine's business: a plain loop keeps it, DDP copies
    it into a bucket, ZeRO reduces it and frees it.
    """

    peak: Level
    """The highest level, finished gradients of parameters left out."""
    parameter: Parameter | None
    """Whose gradient is finished; None after the last one."""
    gradient_bytes: int
    """Size of that gradient; 0 where it was added to one that was there."""
    end: Level
    """What is alive when it ends, the gradient just finished left out too."""
    stations: list[Station]
    """Where modules' backward passes begin in it."""
    last_peak_bytes: int
    """The highest level since the last of them."""
    unsummed_bytes: int = 0
    """By how much more is alive where a module's hook stands between the gradient of its input and
    that of its siblings: they are summed only when the parameter's gradient has been dealt with."""


@dataclass(slots=True)
class BackwardProfile:
    """A segment's backward pass; its output's gradient is alive when it begins."""

    intervals: list[Interval]
    end: Level
    """What is left: the gradient of the input, less what was kept before."""


class ForwardWalk:
    """Forward over one segment, keeping what backward needs, or (checkpointed) little or nothing.

    ``saves`` counts, for each storage that stays, the operations that keep it.
    """

    def __init__(self, segment: Segment, *, keep: bool) -> None:
        self.segment = segment
        self.saves: dict[Storage, int] = {}
        if keep:
            for operation in segment.operations:
                for storage in operation.saved:
                    self.saves[storage] = self.saves.get(storage, 0) + 1

    def run(self) -> ForwardProfile:
        """Walk all operations, as the forward pass does."""
        kept = self.saves
        if self.segment.checkpointed:
            kept = dict.fromkeys(self.segment.kept_outputs, 1)
        elif self.segment.regions:
            kept = self._outside_regions()
        return self._walk(self.segment.operations, kept, present=frozenset())

    def recompute(self) -> ForwardProfile:
        """Walk again what a checkpointed segment runs in its backward pass.

        What policy kept in the first pass is there already; what only the second pass reads of it
        is let go. Nothing but what backward needs is alive at the end.
        """
        present = self.segment.kept_outputs
        operations = self.segment.operations
        if not present:
            operations = operations[: recomputation_stop(self.segment)]
        profile = self._walk(operations, self.saves, present=present)
        spent = sum(storage.num_bytes for storage in present if storage not in self.saves)
        profile.end = Level(saved_bytes=profile.end.saved_bytes - spent)
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
    ) -> ForwardProfile:
        segment = self.segment
        index = segment.index
        output = segment.output.storage if segment.output is not None else None
        dying: list[list[Storage]] = [[] for _ in segment.operations]
        live = saved = peak = peak_saved = cached = 0
        levels: list[tuple[int, int]] = []
        for position, operation in enumerate(operations):
            for tensor in operation.outputs:
                storage = tensor.storage
                if (
                    storage.segment == index
                    and storage not in present
                    and not _is_alias(operation, storage)
                ):
                    size = storage.num_bytes
                    live += size
                    if storage in saves:
                        saved += size
                    elif storage.weight_cast:
                        cached += size
                    elif storage is not output and not storage.held:
                        dying[max(position, storage.last_read)].append(storage)
            highest = live + operation.forward_scratch_bytes
            if highest > peak:
                peak, peak_saved = highest, saved
            for storage in dying[position]:
                live -= storage.num_bytes
            levels.append((highest, live))
        given = segment.input.storage if segment.input is not None else None
        return ForwardProfile(
            peak=Level(saved_bytes=peak_saved, other_bytes=peak - peak_saved),
            end=Level(saved_bytes=saved, other_bytes=live - saved),
            input_freed=given is not None and given not in saves,
            cached_cast_bytes=cached,
            levels=levels,
        )


def _is_alias(operation: Operation, storage: Storage) -> bool:
    return any(tensor.storage is storage for tensor in operation.inputs)


def module_boundaries(segment: Segment) -> frozenset[int]:
    """The operations before whose backward pass that of a module begins."""
    made = {position - 1 for position, _ in segment.left}
    for position, operation in enumerate(segment.operations):
        if any(isinstance(tensor, Parameter) for tensor in operation.inputs):
            made.add(position)
    return frozenset(made)


def recomputation_stop(segment: Segment) -> int:
    """How many operations a checkpointed segment runs again before everything kept is there.

    torch stops recomputing at the last tensor to be kept (``set_checkpoint_early_stop``, on by
    default): an operation that keeps only inputs is not run itself.
    """
    for position in range(len(segment.operations) - 1, -1, -1):
        operation = segment.operations[position]
        if operation.gradients and (operation.saved or _keeps_weight(operation)):
            return position + 1 if operation.saves_output else position
    return 0


def early_gradient_bytes(segment: Segment) -> int:
    """Gradients that exist before anything kept is asked for, and so before it is computed again.

    The last residual sum keeps nothing: under autocast it has cast its gradient for the 16-bit branch
    when the operation before it sets off the recomputation [bytes].
    """
    num_bytes = 0
    for operation in reversed(segment.operations):
        if not operation.gradients:
            continue
        if operation.saved or _keeps_weight(operation):
            break
        pairs = list(zip(operation.inputs, operation.gradients, strict=True))
        if any(kind == Gradient.ALIAS for _, kind in pairs):
            num_bytes += sum(
                _gradient_bytes(tensor)
                for tensor, kind in pairs
                if kind == Gradient.FRESH and tensor.requires_grad
            )
    return num_bytes


def _keeps_weight(operation: Operation) -> bool:
    return operation.name in {"linear", "mul", "layer_norm"}


class _GradientBuffer:
    __slots__ = ("num_bytes", "references")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.references = 1


class BackwardWalk:
    """Backward over one segment whose forward pass kept what it needs."""

    def __init__(
        self,
        segment: Segment,
        saves: dict[Storage, int],
        *,
        in_place_sums: bool,
        accumulated: set[Parameter],
        shared: dict[Tensor, int],
    ) -> None:
        self.segment = segment
        self.saves = dict(saves)
        self.in_place_sums = in_place_sums
        self.accumulated = accumulated
        """Parameters that have a gradient already: a second one is added to it."""
        self.shared = shared
        """Gradients of earlier segments' tensors that exist already, with their sizes."""
        self.live = 0
        """Bytes alive, finished gradients of parameters left out."""
        self.saved = 0
        self.peak = Level()
        """The highest level since the last station."""
        self.highest = Level()
        """And before that, in the present interval."""
        self.stations: list[Station] = []
        self.unsummed = 0
        """What the sums of the present operation have let go."""
        self.intervals: list[Interval] = []
        self.handed_over: set[Storage] = set()
        self.buffers: dict[Tensor, _GradientBuffer] = {}

    def run(self) -> BackwardProfile:
        """Walk the operations backward."""
        segment = self.segment
        if segment.output is not None:
            self.buffers[segment.output] = _GradientBuffer(0)
            self.buffers[segment.output].num_bytes = segment.output.storage.num_bytes
        for tensor, size in self.shared.items():
            self.buffers[tensor] = _GradientBuffer(size)
        replays = {region.stop - 1: region for region in segment.regions}
        boundaries = module_boundaries(segment)
        for position in range(len(segment.operations) - 1, -1, -1):
            if position in replays:
                self._replay(replays[position])
            operation = segment.operations[position]
            if operation.gradients:
                if position in boundaries:
                    self._arrive(position)
                self._step(operation)
        for tensor, buffer in self.buffers.items():
            if tensor.storage.segment != segment.index and tensor is not segment.input:
                self.shared[tensor] = buffer.num_bytes
        for tensor in [each for each in self.shared if each not in self.buffers]:
            del self.shared[tensor]
        self._close(None, 0)
        return BackwardProfile(
            intervals=self.intervals,
            end=Level(saved_bytes=self.saved, other_bytes=self.live - self.saved),
        )

    def _replay(self, region: Region) -> None:
        """Compute a region's dropped storages again, just before its backward pass."""
        again = sum(storage.num_bytes for storage in region.dropped)
        self.live += again
        self.saved += again
        self._mark(0)

    def _arrive(self, position: int) -> None:
        self.stations.append(Station(position, self.peak.total_bytes, self.live))
        self._leave_stretch()

    def _leave_stretch(self) -> None:
        """Begin to look for a highest level anew."""
        if self.peak.total_bytes > self.highest.total_bytes:
            self.highest = self.peak
        self.peak = Level(saved_bytes=self.saved, other_bytes=self.live - self.saved)

    def _mark(self, extra: int) -> None:
        if self.live + extra > self.peak.total_bytes:
            self.peak = Level(saved_bytes=self.saved, other_bytes=self.live + extra - self.saved)

    def _close(self, parameter: Parameter | None, gradient_bytes: int) -> None:
        self.live -= gradient_bytes
        other = self.live - self.saved
        last = self.peak.total_bytes
        self._leave_stretch()
        self.intervals.append(
            Interval(
                peak=self.highest,
                parameter=parameter,
                gradient_bytes=gradient_bytes,
                end=Level(saved_bytes=self.saved, other_bytes=other),
                stations=self.stations,
                last_peak_bytes=last,
                unsummed_bytes=self.unsummed,
            )
        )
        self.highest = self.peak
        self.stations = []

    def _release(self, buffer: _GradientBuffer) -> None:
        buffer.references -= 1
        if buffer.references == 0:
            self.live -= buffer.num_bytes

    def _step(self, operation: Operation) -> None:
        incoming = [
            buffer
            for tensor in operation.outputs
            if (buffer := self.buffers.pop(tensor, None)) is not None
        ]
        made: list[tuple[Tensor, _GradientBuffer]] = []
        temporaries = converted = self.unsummed = 0
        if incoming:
            handed_over = iter(operation.saved)
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=True):
                if not tensor.requires_grad or kind == Gradient.NONE:
                    continue
                if kind == Gradient.ALIAS:
                    incoming[0].references += 1
                    made.append((tensor, incoming[0]))
                    continue
                if kind == Gradient.SAVED:
                    self._hand_over(next(handed_over))
                    kind = Gradient.FRESH
                temporaries += kind
                buffer = _GradientBuffer(_gradient_bytes(tensor))
                self.live += buffer.num_bytes
                made.append((tensor, buffer))
                if kind:
                    converted += buffer.num_bytes
            if not self.segment.checkpointed:
                converted = 0
            self._mark(max(temporaries, operation.backward_scratch_bytes) - converted)
        for storage in operation.saved:
            count = self.saves[storage] - 1
            self.saves[storage] = count
            if count == 0 and storage not in self.handed_over:
                self.live -= storage.num_bytes
                self.saved -= storage.num_bytes
        if converted:
            # What was recomputed is let go by the formula itself, before the engine casts or sums
            # what the formula returned (``validate_outputs``).
            self._mark(temporaries)
        for buffer in incoming:
            self._release(buffer)
        for tensor, buffer in made:
            self._deliver(tensor, buffer)

    def _hand_over(self, storage: Storage) -> None:
        """A gradient made in the forward pass: what was kept becomes the gradient itself."""
        self.handed_over.add(storage)
        self.live -= storage.num_bytes
        self.saved -= storage.num_bytes

    def _deliver(self, tensor: Tensor, buffer: _GradientBuffer) -> None:
        if isinstance(tensor, Parameter):
            self._accumulate(tensor, buffer)
            return
        present = self.buffers.get(tensor)
        if present is None:
            self.buffers[tensor] = buffer
            return
        apart = self.live
        if self.in_place_sums and present.references == 1:
            self._mark(0)
            self._release(buffer)
        else:
            total = _GradientBuffer(_gradient_bytes(tensor))
            self.live += total.num_bytes
            self._mark(0)
            self._release(present)
            self._release(buffer)
            self.buffers[tensor] = total
        self.unsummed += apart - self.live

    def _accumulate(self, parameter: Parameter, buffer: _GradientBuffer) -> None:
        if parameter in self.accumulated:
            self._mark(0 if self.in_place_sums else _gradient_bytes(parameter))
            self._release(buffer)
            self._close(parameter, 0)
            return
        self.accumulated.add(parameter)
        if buffer.references > 1:
            copy = _GradientBuffer(_gradient_bytes(parameter))
            self.live += copy.num_bytes
            self._mark(0)
            self._release(buffer)
            buffer = copy
        self._mark(0)
        self._close(parameter, buffer.num_bytes)


def _gradient_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel * tensor.dtype.num_bytes // 512) * 512
