"""Walking a segment of the tape backward, in the order of torch's autograd engine.

The operations run in reverse; each one makes the gradients of its inputs while its own output's gradient
and everything it kept are still alive, then lets both go (torch/csrc/autograd/engine.cpp:
``evaluate_function`` calls the node, validates its outputs, releases its saved variables, then adds the
outputs to the next nodes' buffers). A profile is relative to the bytes alive when it begins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.graph.declaration import registered
from memplan.graph.operation_kinds import EXTERN_KERNELS
from memplan.graph.segments import (
    NOT_HANDED,
    Change,
    Gradient,
    Operation,
    Region,
    Segment,
    scratch_changes,
)
from memplan.graph.tensors import (
    ALLOCATION_ROUNDING,
    Parameter,
    Storage,
    Tensor,
    allocated_bytes,
)
from memplan.memory.reduction import Multiprocessors, column_sum_scratch
from memplan.memory.walk import (
    WORKSPACE,
    Event,
    ForwardProfile,
    ForwardWalk,
    Level,
    forward_stages,
    keeps_something,
)
from memplan.training.compilation import Compilation


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
    events: list[Event]
    """Allocations and frees, in torch's order; the finished gradient stays."""
    marks: list[tuple[int, int]]
    """How many of them come before an operation, and its position: that of its backward pass, or
    ``~position`` for its forward pass, run again."""
    gradient: object = None
    """The finished gradient's key in the events; None where it was added to another."""


@dataclass(slots=True)
class BackwardProfile:
    """A segment's backward pass; its output's gradient is alive when it begins."""

    intervals: list[Interval]
    end: Level
    """What is left: the gradient of the input, less what was kept before."""
    given: "dict[Tensor, GradientBuffer]"
    """Gradients that are there when it begins."""
    left: "dict[Tensor, GradientBuffer]"
    """Gradients of earlier segments' tensors that are there when it ends."""
    arriving: Sequence[object] = ()
    """Keys of what had come back from CPU RAM when it began."""
    leaving: Sequence[object] = ()
    """Keys of what has when it ends."""
    streams: Mapping[object, int] = field(default_factory=dict)
    """Of the blocks that are not of the main stream's memory."""


class Extent(Enum):
    """Which gradients a backward pass computes."""

    ALL = "all"
    INPUTS = "inputs"
    """That of the stage's input alone: the graph stays, and with it the gradients that those of weights
    will come from (torch/distributed/pipelining/_backward.py, ``stage_backward_input``)."""
    WEIGHTS = "weights"
    """Those of the weights, behind ``INPUTS`` (``stage_backward_weight``)."""

    __hash__ = object.__hash__


class GradientBuffer:
    """A gradient on its way: what autograd's input buffers hold."""

    __slots__ = ("is_view", "num_bytes", "parts", "references")

    def __init__(self, num_bytes: int, *, is_view: bool = False) -> None:
        self.num_bytes = num_bytes
        self.references = 1
        self.is_view = is_view
        """It is a view of what a formula returned, so that nothing is added to it in place."""
        self.parts: tuple[GradientBuffer, ...] = ()
        """In a compiled region: gradients that the kernel that reads them adds up."""


class BackwardWalk:
    """Backward over one segment whose forward pass kept what it needs."""

    def __init__(
        self,
        segment: Segment,
        saves: dict[Storage, int],
        *,
        in_place_sums: bool,
        accumulated: dict[Parameter, bool],
        shared: dict[Tensor, int],
        again: ForwardProfile | None = None,
        device: Multiprocessors | None = None,
        hooked: bool = False,
        lent: bool = False,
    ) -> None:
        self.extent = Extent.ALL
        self.on_way: set[Tensor] = set()
        """What is computed from what the segment was given."""
        self.captured: dict[Operation, GradientBuffer] = {}
        """Gradients of what weights' operations made, for the pass of the weights."""
        self.calls = 0
        """Of weights, in which a checkpointed segment was run again."""
        self.gone: set[Operation] = set()
        """Whose nodes have let go of what they kept, where that is no once and for all."""
        self.device = device
        self.lent = lent
        """The gradient of what it returns lies in a buffer that stays, and that nothing is added to."""
        self.hooked = hooked
        self.segment = segment
        self.saves = dict(saves)
        self.again = again
        """The forward pass that a checkpointed segment runs again when something kept is asked for."""
        self.in_place_sums = in_place_sums
        self.accumulated = accumulated
        """Parameters that have a gradient already, to which a second one is added; and whether it is
        a view, so that the sum is a new tensor."""
        self.shared = shared
        """Gradients of earlier segments' tensors that exist already, with their sizes."""
        self.live = 0
        """Bytes alive, finished gradients of parameters left out."""
        self.saved = 0
        self.earlier = 0
        """What earlier segments made of it."""
        self.peak = Level()
        """The highest level in the present interval."""
        self.intervals: list[Interval] = []
        self.events: list[Event] = []
        self.marks: list[tuple[int, int]] = []
        self.handed_over: set[Storage] = set()
        self.across: set[GradientBuffer] = set()
        """Gradients that lie head by head, since what they are of came back in rows of its heads."""
        self.buffers: dict[Tensor, GradientBuffer] = {}
        self.is_compiled = segment.compiled is not Compilation.NONE
        self.finished: list[tuple[Parameter, int, GradientBuffer | None]] = []
        """Gradients that a compiled region hands over when it returns."""
        self.read: list[Operation] = []
        """Operations of the fused kernel at hand: what they kept goes when all of it has been written."""
        self.holders = 0
        """Operations that still hold what a checkpointed segment's recomputation is given."""
        self.unpacks = segment.checkpointed and not segment.nested
        """What was recomputed is unpacked into variables of the formula, where it is asked for."""
        self.returned: dict[Region, tuple[object, GradientBuffer | None]] = {}
        """Of regions whose own backward passes run: what they returned, and its gradient."""
        self.copies: dict[Region, list[tuple[object, int]]] = {}
        """Of those that filled what others read: what they filled it from."""

    def limit(self, extent: Extent) -> None:
        """Compute some of the gradients alone."""
        self.extent = extent
        self.on_way = on_way(self.segment)

    def run(self) -> BackwardProfile:
        """Walk the operations backward."""
        segment = self.segment
        if segment.keeps_input and segment.input is not None:
            for storage in segment.given:
                self.saves[storage] = self.saves.get(storage, 0) + 1
            if not segment.nested:
                self.holders = sum(map(keeps_something, segment.operations))
        if segment.output is not None:
            is_foreign = segment.compiled is Compilation.LAYER or self.lent
            size = 0 if self.lent else segment.output.storage.num_bytes
            self.buffers[segment.output] = GradientBuffer(size, is_view=is_foreign)
        for tensor, size in self.shared.items():
            self.buffers[tensor] = GradientBuffer(size)
        given: dict[Tensor, GradientBuffer] = dict(self.buffers)
        if segment.nested:
            self._begin_nested()
        replays: dict[int, list[Region]] = {}
        for region in reversed(segment.regions):
            replays.setdefault(region.stop - 1, []).append(region)
        ends = {
            region.start: region
            for region in segment.regions
            if region.result is not None or region.copied
        }
        for position in range(len(segment.operations) - 1, -1, -1):
            for region in replays.get(position, ()):
                self._replay(region)
            operation = segment.operations[position]
            if operation.gradients:
                self.marks.append((len(self.events), position))
                if self.again is not None and keeps_something(operation):
                    self._recompute(self.again)
                self._step(operation)
            if position in ends:
                self._end_region(ends[position])
        if self.again is not None:
            self._recompute(self.again)
        if segment.nested:
            self._end_nested(given)
        if self.is_compiled:
            self._end_kernel()
            self._return()
        left: dict[Tensor, GradientBuffer] = {}
        for tensor, buffer in self.buffers.items():
            if tensor.storage.segment != segment.index:
                left[tensor] = buffer
                if tensor is not segment.input:
                    self.shared[tensor] = buffer.num_bytes
        for tensor in [each for each in self.shared if each not in self.buffers]:
            del self.shared[tensor]
        self._close(None, 0)
        end = self._level()
        passed = _total(left) - _total(
            {each: buffer for each, buffer in given.items() if each is not segment.output}
        )
        end.passed_bytes = passed
        end.other_bytes -= passed
        return BackwardProfile(intervals=self.intervals, end=end, given=given, left=left)

    def _level(self) -> Level:
        """What is alive now; ``saved`` counts what earlier segments made too."""
        return Level(
            saved_bytes=self.saved - self.earlier,
            other_bytes=self.live - self.saved,
            earlier_bytes=self.earlier,
        )

    def _allocate(self, key: object, num_bytes: int) -> None:
        self.live += num_bytes
        self.events.append((key, num_bytes))
        if self.live > self.peak.total_bytes:
            self.peak = self._level()

    def _free(self, key: object, num_bytes: int) -> None:
        self.live -= num_bytes
        self.events.append((key, 0))

    def _play(self, changes: Sequence[Change]) -> None:
        for key, size in changes:
            if size > 0:
                self._allocate(key, size)
            else:
                self._free(key, -size)

    def _release(self, buffer: GradientBuffer) -> None:
        buffer.references -= 1
        if buffer.references == 0:
            self._free(buffer, buffer.num_bytes)
            for part in buffer.parts:
                self._release(part)

    def _let_go(self, operation: Operation) -> None:
        """``release_variables``: what only this operation still kept is freed."""
        if self.extent is Extent.INPUTS and not self.segment.checkpointed:
            return  # retain_graph=True
        if self.extent is Extent.WEIGHTS:
            if operation in self.gone:
                return
            self.gone.add(operation)
        # What was recomputed is unpacked into variables of the formula, which go in reverse order.
        unpacks = self.unpacks or operation.handed
        saved = reversed(operation.saved) if unpacks else operation.saved
        for storage in saved:
            self._unkeep(storage)

    def _unkeep(self, storage: Storage) -> None:
        count = self.saves[storage] - 1
        self.saves[storage] = count
        if storage.kept_by_maker and storage.segment != self.segment.index:
            return
        if count == 0 and storage not in self.handed_over:
            self.saved -= storage.num_bytes
            if self.calls:
                self._free_in_calls(storage)
                return
            if storage.segment != self.segment.index:
                self.earlier -= storage.num_bytes
            self._free(storage, storage.num_bytes)

    def _free_in_calls(self, storage: Storage) -> None:
        """Free what each call has made of it, the segment's input aside, which is none of them."""
        self.saved += storage.num_bytes
        if storage.segment == self.segment.index:
            for call in range(self.calls):
                self.saved -= storage.num_bytes
                self._free((call, storage), storage.num_bytes)

    def _end_kernel(self) -> None:
        """A kernel has written all that it writes: what it alone still read goes."""
        for operation in self.read:
            self._let_go(operation)
        self.read.clear()

    def _let_go_of_given(self, operation: Operation) -> None:
        """With the last kept tensor goes what the recomputation was given: the segment's input."""
        if not self.holders or not keeps_something(operation) or self.extent is Extent.INPUTS:
            return
        self.holders -= 1
        if not self.holders:
            for storage in self.segment.given:
                self._unkeep(storage)

    def _recompute(self, again: ForwardProfile) -> None:
        """Run a checkpointed segment's forward pass again.

        Modules whose backward pass has begun by then are noted where it has run.
        """
        self.again = None
        highest = self.live + again.peak.total_bytes
        if highest > self.peak.total_bytes:
            saved = self.saved - self.earlier + again.peak.saved_bytes
            self.peak = Level(
                saved_bytes=saved,
                other_bytes=highest - saved - self.earlier,
                earlier_bytes=self.earlier,
            )
        recomputed = again.end.total_bytes
        before = len(self.events)
        self.marks += [(before + start, ~number) for number, start in enumerate(again.starts)]
        self.events += again.events
        self.live += recomputed
        self.saved += recomputed
        self._close(None, 0)

    def _begin_nested(self) -> None:
        """Run all of a checkpointed segment again; its output's gradient stays to the end."""
        output = self.segment.output
        if output is not None:
            self.buffers[output].references += 1
        if self.again is not None:
            self._recompute(self.again)

    def _end_nested(self, given: "dict[Tensor, GradientBuffer]") -> None:
        """The function returns: its variables go, with what was kept for it."""
        segment = self.segment
        output = segment.output
        if output is not None:
            if output.storage.segment == segment.index:
                self._unkeep(output.storage)
            self._release(given[output])
        for storage in segment.given:
            self._unkeep(storage)

    def _replay(self, region: Region) -> None:
        """Compute a region's dropped storages again, just before its backward pass."""
        if region.result is not None:
            self._run_again(region, region.result)
            return
        operations = self.segment.operations[region.start : region.stop]
        made = [tensor.storage for operation in operations for tensor in operation.outputs]
        for storage in dict.fromkeys(made):
            if storage in region.dropped:
                self.saved += storage.num_bytes
                self._allocate(storage, storage.num_bytes)
        copies = [(object(), storage.num_bytes) for storage in region.copied]
        for copy, num_bytes in copies:
            self._allocate(copy, num_bytes)
        self.copies[region] = copies

    def _run_again(self, region: Region, result: Tensor) -> None:
        """The same with all temporaries, for a backward pass of its own."""
        incoming = self.buffers.get(result)
        if incoming is not None:
            incoming.references += 1
        self.returned[region] = key, _ = (object(), incoming)
        dying: dict[int, list[Storage]] = {}
        for position in range(region.start, region.stop):
            operation = self.segment.operations[position]
            stages: Sequence[Sequence[Change]] = [[], []]
            if operation.forward_scratch or operation.tiles is not None:
                stages = forward_stages(operation)
            self._play(stages[0])
            own = {tensor.storage for tensor in operation.inputs}
            for storage in dict.fromkeys(tensor.storage for tensor in operation.outputs):
                if storage in own or storage.segment != self.segment.index:
                    continue
                if storage is result.storage:
                    self._allocate(key, storage.num_bytes)
                    continue
                if storage in region.dropped:
                    self.saved += storage.num_bytes
                else:
                    last = min(max(storage.last_read, position), region.stop - 1)
                    dying.setdefault(last, []).append(storage)
                self._allocate(storage, storage.num_bytes)
            if operation.multiplies:
                self.events.append((WORKSPACE, 0))
            for stage in stages[1:]:
                self._play(stage)
            for storage in dying.pop(position, ()):
                self._free(storage, storage.num_bytes)

    def _end_region(self, region: Region) -> None:
        """Its backward pass is over: what was kept for it goes."""
        for copy, num_bytes in self.copies.pop(region, ()):
            self._free(copy, num_bytes)
        if region.result is not None:
            key, incoming = self.returned.pop(region)
            self._free(key, region.result.storage.num_bytes)
            if incoming is not None:
                self._release(incoming)
        for storage in region.given:
            self._unkeep(storage)

    def _close(
        self, parameter: Parameter | None, gradient_bytes: int, gradient: object = None
    ) -> None:
        self.live -= gradient_bytes
        end = self._level()
        self.intervals.append(
            Interval(
                peak=self.peak,
                parameter=parameter,
                gradient_bytes=gradient_bytes,
                end=end,
                events=self.events,
                marks=self.marks,
                gradient=gradient,
            )
        )
        self.events = []
        self.marks = []
        self.peak = end

    def _step(self, operation: Operation) -> None:
        """Call one node: formula, sums and casts, then its inputs and saved variables go."""
        incoming = [
            buffer
            for tensor in operation.outputs
            if (buffer := self.buffers.pop(tensor, None)) is not None
        ]
        if self.across:
            incoming = self._in_rows(operation, incoming)
        if self.is_compiled and operation.kind in EXTERN_KERNELS:
            self._end_kernel()
        if not incoming:
            self._let_go(operation)
            self._let_go_of_given(operation)
            return
        if self.extent is Extent.INPUTS and self._has_weights(operation):
            incoming[0].references += 1
            self.captured[operation] = incoming[0]
        made, products = self._formula(operation, incoming[0])
        # What was recomputed is let go by the formula itself, before the engine casts or sums
        # what the formula returned (``validate_outputs``).
        # So does it with what hooks give it.
        unpacks = self.unpacks or bool(operation.handed)
        if unpacks and not self.is_compiled:
            self._let_go(operation)
        if len(products) > 1:  # validated in the order of the inputs, whatever the formula's was
            products.sort(key=lambda each: operation.inputs.index(each[1]))
        for product, tensor, buffer in products:
            self._allocate(buffer, buffer.num_bytes)
            if tensor.by_column:
                self._sum_rows(tensor, operation.outputs[0])
            if product is not incoming[0]:
                self._free(product, product.num_bytes)
        if operation.handed or self.segment.input_away is not None:
            self._end_formula(operation)
        for buffer in incoming:
            self._release(buffer)
        if self.is_compiled:
            self.read.append(operation)
            if operation.kind in EXTERN_KERNELS:
                self._end_kernel()
        elif not unpacks:
            self._let_go(operation)
        self._let_go_of_given(operation)
        # Next edges are served in the order of the inputs, whatever order the formula went in.
        made.sort(key=lambda each: operation.inputs.index(each[0]))
        if self.hooked:
            # A module's hook stands before the gradient of its input, but not before its weights'.
            made.sort(key=lambda each: not isinstance(each[0], Parameter))
        for tensor, buffer in made:
            self._deliver(tensor, buffer)

    def _is_wanted(self, tensor: Tensor) -> bool:
        """Whether this pass computes its gradient."""
        if self.extent is Extent.ALL:
            return True
        return (tensor in self.on_way) is (self.extent is Extent.INPUTS)

    def _has_weights(self, operation: Operation) -> bool:
        """Whether gradients of weights come out of it too."""
        return any(
            tensor.requires_grad and kind not in NOT_HANDED and tensor not in self.on_way
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=False)
        )

    def _formula(
        self, operation: Operation, incoming: GradientBuffer
    ) -> tuple[
        list[tuple[Tensor, GradientBuffer]],
        list[tuple[GradientBuffer, Tensor, GradientBuffer]],
    ]:
        """The gradients it returns, and those that are summed or cast afterwards."""
        made: list[tuple[Tensor, GradientBuffer]] = []
        products: list[tuple[GradientBuffer, Tensor, GradientBuffer]] = []
        stages: list[Sequence[Change]] = []
        if operation.tiles is not None:
            stages = list(operation.tiles.backward)
        elif operation.backward_scratch:
            stages = [*scratch_changes(operation.backward_scratch)]
        if stages:
            self._play(stages.pop(0))
        handed_over = iter(operation.saved)
        for tensor, kind in operation.backward_order():
            if not tensor.requires_grad or kind in NOT_HANDED or not self._is_wanted(tensor):
                continue
            if kind == Gradient.ALIAS:
                incoming.references += 1
                made.append((tensor, incoming))
                continue
            if kind == Gradient.REUSED:
                reused = _reusable(incoming, _gradient_bytes(tensor))
                if reused is not None:
                    reused.references += 1
                    made.append((tensor, reused))
                    continue
                kind = Gradient.FRESH
            if kind == Gradient.SAVED:
                kept = next(handed_over, None)
                if kept is not None:  # else it has come back for this formula
                    self._hand_over(kept)
                kind = Gradient.FRESH
            if made and len(stages) > 1:
                self._play(stages.pop(0))
            size = _whole_bytes(tensor) if kind == Gradient.WHOLE else _gradient_bytes(tensor)
            buffer = GradientBuffer(size, is_view=kind == Gradient.VIEW)
            made.append((tensor, buffer))
            if kind == Gradient.SUMMED:
                products.append((incoming, tensor, buffer))
            elif kind > 0:
                product = GradientBuffer(kind)
                products.append((product, tensor, buffer))
                self._allocate(product, kind)
            else:
                self._allocate(buffer, buffer.num_bytes)
            if operation.multiplies and len(made) == 1:
                self.events.append((WORKSPACE, 0))
        for stage in stages:
            self._play(stage)
        return made, products

    def _in_rows(
        self, operation: Operation, incoming: list[GradientBuffer]
    ) -> list[GradientBuffer]:
        """Gradients as a product takes them: copied into rows where they lie otherwise."""
        found = []
        for buffer in incoming:
            if buffer in self.across and operation.multiplies:
                rows = GradientBuffer(buffer.num_bytes)
                self._allocate(rows, rows.num_bytes)
                self._release(buffer)
                found.append(rows)
            else:
                found.append(buffer)
        return found

    def _end_formula(self, operation: Operation) -> None:
        """A formula that reads what went to CPU RAM has run."""

    def _sum_rows(self, tensor: Tensor, out: Tensor) -> None:
        """What the kernel that sums a gradient over its rows asks for beside the result."""
        if self.device is None:
            return
        columns = tensor.numel
        size = out.numel * out.dtype.num_bytes
        for blocks in column_sum_scratch(columns, out.numel // columns, size, self.device):
            self._play(scratch_changes(blocks)[-1])

    def _hand_over(self, storage: Storage) -> None:
        """A gradient made in the forward pass: what was kept becomes the gradient itself."""
        self.handed_over.add(storage)
        self.saved -= storage.num_bytes
        self._free(storage, storage.num_bytes)

    def _deliver(self, tensor: Tensor, buffer: GradientBuffer) -> None:
        if isinstance(tensor, Parameter):
            self._accumulate(tensor, buffer)
            return
        present = self.buffers.get(tensor)
        if present is None:
            self.buffers[tensor] = buffer
            return
        if self.is_compiled:
            both = GradientBuffer(0)
            both.parts = (present, buffer)
            self.buffers[tensor] = both
            return
        if self.in_place_sums and present.references == 1 and not present.is_view:
            self._release(buffer)
        else:
            total = GradientBuffer(_gradient_bytes(tensor))
            self._allocate(total, total.num_bytes)
            self._release(present)
            self._release(buffer)
            self.buffers[tensor] = total

    def _accumulate(self, parameter: Parameter, buffer: GradientBuffer) -> None:
        if parameter in self.accumulated:
            own = None
            if buffer.num_bytes > _gradient_bytes(parameter):
                # Of what is made whole a rank's own part is copied out for the sum.
                own = GradientBuffer(_gradient_bytes(parameter))
                self._allocate(own, own.num_bytes)
            total = None
            if self.accumulated[parameter] or not self.in_place_sums:
                # The sum takes the place of the gradient that is there.
                total = GradientBuffer(_gradient_bytes(parameter))
                self._allocate(total, total.num_bytes)
                self.live -= total.num_bytes
            if own is not None:
                self._release(own)
            self._release(buffer)
            self.accumulated[parameter] = False
            self._finish(parameter, 0, total)
            return
        self.accumulated[parameter] = buffer.is_view
        if buffer.references > 1:
            copy = GradientBuffer(_gradient_bytes(parameter))
            self._allocate(copy, copy.num_bytes)
            self._release(buffer)
            buffer = copy
        self._finish(parameter, buffer.num_bytes, buffer)

    def run_weights(
        self, captured: "dict[Operation, GradientBuffer]", *, is_last: bool
    ) -> BackwardProfile:
        """The gradients of the weights, from what the pass of the inputs has left.

        Each weight's operation is a call of ``torch.autograd.grad`` of its own, in the order of the
        parameters; what it returned stays until the next one has. What is checkpointed is run again in
        each of these calls, and what that keeps stays as long as the graph does, for nothing but this
        weight's operation takes it up (``torch.utils.checkpoint``: one recomputation for each graph
        task, in ``frame.recomputed``). The graph of the ``is_last`` segment goes as its weights do; that
        of others is held by what stands behind them.
        """
        segment = self.segment
        order = {
            parameter: number for number, parameter in enumerate(registered(segment.parameters))
        }
        aside = [each for each in segment.operations if not self.on_way.intersection(each.outputs)]
        owners = _owners(segment, aside)
        groups = sorted(captured, key=lambda each: min(order[one] for one in owners(each)))
        for number, operation in enumerate(groups):
            before, self.finished = self.finished, []
            if segment.checkpointed:
                self._recompute_for(number)
            self.buffers[operation.outputs[0]] = captured[operation]
            self._step(operation)
            for each in reversed(aside):
                if any(out in self.buffers for out in each.outputs):
                    self._step(each)
            for parameter, gradient_bytes, gradient in before:
                self._close(parameter, gradient_bytes, gradient)
            if is_last:
                self._let_go_behind(groups[number + 1 :])
        for parameter, gradient_bytes, gradient in self.finished:
            self._close(parameter, gradient_bytes, gradient)
        self._close(None, 0)
        return BackwardProfile(intervals=self.intervals, end=self._level(), given={}, left={})

    def _recompute_for(self, number: int) -> None:
        """Run a checkpointed segment again for one call alone: its blocks are none of the other calls'."""
        walk = ForwardWalk(self.segment, keep=True)
        walk.saves = {each: count for each, count in self.saves.items() if count}
        again = walk.recompute()
        highest = self.live + again.peak.total_bytes
        if highest > self.peak.total_bytes:
            saved = self.saved - self.earlier + again.peak.saved_bytes
            self.peak = Level(
                saved_bytes=saved,
                other_bytes=highest - saved - self.earlier,
                earlier_bytes=self.earlier,
            )
        self.events += [
            (key if key is WORKSPACE else (number, key), size) for key, size in again.events
        ]
        self.calls = number + 1
        self.live += again.end.total_bytes
        self.saved += again.end.total_bytes

    def _let_go_behind(self, groups: Sequence[Operation]) -> None:
        """What no weight is behind that is still to come: its node goes, and what that kept."""
        needed: set[Tensor] = set()
        for operation in reversed(self.segment.operations):
            if operation in groups or not needed.isdisjoint(operation.outputs):
                needed.update(operation.inputs)
            elif operation.gradients:
                self._let_go(operation)

    def _finish(
        self, parameter: Parameter, gradient_bytes: int, gradient: GradientBuffer | None
    ) -> None:
        """Hand a gradient over: at once, or when the compiled region or another call returns."""
        if self.is_compiled or self.extent is Extent.WEIGHTS:
            self.finished.append((parameter, gradient_bytes, gradient))
        else:
            self._close(parameter, gradient_bytes, gradient)

    def _return(self) -> None:
        """A compiled region returns: the gradients of what it was given, each in one tensor, and those
        of its parameters (torch/_functorch/_aot_autograd, one ``autograd.Function`` a graph)."""
        for tensor, buffer in self.buffers.items():
            if buffer.parts:
                whole = GradientBuffer(_gradient_bytes(tensor))
                self._allocate(whole, whole.num_bytes)
                self._release(buffer)
                self.buffers[tensor] = whole
        for parameter, gradient_bytes, gradient in self.finished:
            self._close(parameter, gradient_bytes, gradient)


def on_way(segment: Segment) -> set[Tensor]:
    """What a segment computes from its input, that with it, as far as gradients go back to it."""
    found = (
        {*segment.further_inputs}
        if segment.input is None
        else {segment.input, *segment.further_inputs}
    )
    for operation in segment.operations:
        if operation.gradients and not found.isdisjoint(operation.inputs):
            found.update(operation.outputs)
    return found


def _owners(
    segment: Segment, aside: Sequence[Operation]
) -> "Callable[[Operation], list[Parameter]]":
    """Which weights' gradients come out of an operation, casts of weights looked through."""
    weights: dict[Tensor, list[Parameter]] = {each: [each] for each in segment.parameters}
    for operation in aside:
        found = [one for tensor in operation.inputs for one in weights.get(tensor, ())]
        for tensor in operation.outputs if found else ():
            weights[tensor] = found

    def owners(operation: Operation) -> list[Parameter]:
        return [one for tensor in operation.inputs for one in weights.get(tensor, ())]

    return owners


def _reusable(buffer: GradientBuffer, num_bytes: int) -> GradientBuffer | None:
    """What a fused kernel reads last and writes over (torch/_inductor/scheduler.py, in-place buffers)."""
    if buffer.references > 1:
        return None
    for part in buffer.parts or (buffer,):
        if part.references == 1 and part.num_bytes == num_bytes and not part.is_view:
            return part
    return None


def _total(buffers: "dict[Tensor, GradientBuffer]") -> int:
    return sum(buffer.num_bytes for buffer in buffers.values())


def _gradient_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel * tensor.dtype.num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING


def _whole_bytes(tensor: Tensor) -> int:
    assert isinstance(tensor, Parameter)
    return allocated_bytes(tensor.num_weights, tensor.dtype)
