"""Walking a segment of the tape backward, in the order of torch's autograd engine.

The operations run in reverse; each one makes the gradients of its inputs while its own output's gradient
and everything it kept are still alive, then lets both go (torch/csrc/autograd/engine.cpp:
``evaluate_function`` calls the node, validates its outputs, releases its saved variables, then adds the
outputs to the next nodes' buffers). What becomes of the gradients is ``memplan.memory.walks.gradient_flow``'s.
"""

from collections.abc import Iterable, Sequence

from memplan.graph.core.operation_kinds import EXTERN_KERNELS, OperationKind
from memplan.graph.core.segments import (
    NOT_HANDED,
    Change,
    Gradient,
    Operation,
    Region,
    Segment,
    scratch_changes,
)
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.graph.operations.reduction import Multiprocessors, column_sum_scratch
from memplan.memory.walks.backward_profile import BackwardProfile, GradientBuffer, SharedGradient
from memplan.memory.walks.gradient_flow import GradientFlow, gradient_bytes_of
from memplan.memory.walks.walk import (
    WORKSPACE,
    ForwardProfile,
    forward_stages,
    keeps_something,
)
from memplan.training.compilation import Compilation

Made = list[tuple[Tensor, GradientBuffer]]
"""Gradients that a formula returns, and of what they are."""
Products = list[tuple[GradientBuffer, Tensor, GradientBuffer]]
"""What is summed or cast behind a formula, of what it is the gradient, and what that is made into."""


class BackwardWalk(GradientFlow):
    """Backward over one segment whose forward pass kept what it needs."""

    def __init__(
        self,
        segment: Segment,
        saves: dict[Storage, int],
        *,
        in_place_sums: bool,
        accumulated: dict[Parameter, bool],
        shared: dict[Tensor, SharedGradient],
        again: ForwardProfile | None = None,
        device: Multiprocessors | None = None,
        hooked: bool = False,
        lent: bool = False,
        dying: frozenset[Storage] = frozenset(),
    ) -> None:
        super().__init__(
            in_place_sums=in_place_sums,
            accumulated=accumulated,
            is_compiled=segment.compiled is not Compilation.NONE,
        )
        self.device = device
        self.sums: dict[tuple[int, int, int], Sequence[Sequence[int]]] = {}
        """Sums over rows that were asked for, and what each takes on this card."""
        self.lent = lent
        """The gradient of what it returns lies in a buffer that stays, and that nothing is added to."""
        self.hooked = hooked
        self.segment = segment
        self.saves = dict(saves)
        self.again = again
        """The forward pass that a checkpointed segment runs again when something kept is asked for."""
        self.shared = shared
        """Gradients of earlier segments' tensors that exist already."""
        self.handed_over: dict[Storage, GradientBuffer] = {}
        self.across: set[GradientBuffer] = set()
        """Gradients that lie head by head, since what they are of came back in rows of its heads."""
        self.read: list[Operation] = []
        """Operations of the fused kernel at hand: what they kept goes when all of it has been written."""
        self.dying = dying
        """What earlier segments made, and goes with the last operation of this one that keeps it."""
        self.outside: dict[Storage, int] = {}
        """What earlier segments made, and how many operations still keep it."""
        for operation in segment.operations:
            for storage in operation.outside:
                self.outside[storage] = self.outside.get(storage, 0) + 1
        self.holders = 0
        """Operations that still hold what a checkpointed segment's recomputation is given."""
        self.unpacks = segment.checkpointed and not segment.nested
        """What was recomputed is unpacked into variables of the formula, where it is asked for."""
        self.returned: dict[Region, tuple[object, GradientBuffer | None]] = {}
        """Of regions whose own backward passes run: what they returned, and its gradient."""
        self.copies: dict[Region, list[tuple[object, int]]] = {}
        """Of those that filled what others read: what they filled it from."""

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
            # Of a view, the gradient is no larger than what is seen.
            whole = allocated_bytes(segment.output.numel, segment.output.dtype)
            size = 0 if self.lent else whole
            self.first = GradientBuffer(size, is_view=is_foreign)
            self.buffers[segment.output] = self.first
        for tensor, (size, is_view) in self.shared.items():
            self.buffers[tensor] = GradientBuffer(size, is_view=is_view)
        given: dict[Tensor, GradientBuffer] = dict(self.buffers)
        if segment.nested:
            self._begin_nested()
        self._run_operations(segment)
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
                    self.shared[tensor] = SharedGradient(buffer.num_bytes, buffer.is_view)
        for tensor in [each for each in self.shared if each not in self.buffers]:
            del self.shared[tensor]
        self._close(None, 0)
        end = self._level()
        passed = _total(left) - _total(
            {each: buffer for each, buffer in given.items() if each is not segment.output}
        )
        end.passed_bytes = passed
        end.other_bytes -= passed
        handed: dict[object, GradientBuffer] = {
            storage: buffer
            for storage, buffer in self.handed_over.items()
            if storage.num_bytes == buffer.num_bytes
        }
        return BackwardProfile(
            intervals=self.intervals,
            end=end,
            given=given,
            left=left,
            first_sum=self.first_sum,
            handed=handed,
        )

    def _run_operations(self, segment: Segment) -> None:
        """Every operation, the last one first, and the regions that are computed again on their own."""
        replays: dict[int, list[Region]] = {}
        for region in reversed(segment.regions):
            replays.setdefault(region.stop - 1, []).append(region)
        ends = {
            region.start: region
            for region in segment.regions
            if region.result is not None or region.copied
        }
        operations = segment.operations
        for position in range(len(operations) - 1, -1, -1):
            for region in replays.get(position, ()):
                self._replay(region)
            operation = operations[position]
            if operation.gradients:
                self.marks.append((len(self.events), position))
                if self.again is not None and operation.keeps:
                    self._recompute(self.again)
                self._step(operation)
            if position in ends:
                self._end_region(ends[position])

    # -- what was kept ---------------------------------------------------------------------------

    def _let_go(self, operation: Operation) -> None:
        """``release_variables``: what only this operation still kept is freed."""
        saves = self.saves
        # What was recomputed is unpacked into variables of the formula, which go in reverse order.
        unpacks = self.unpacks or operation.handed
        for storage in reversed(operation.saved) if unpacks else operation.saved:
            left = saves[storage] - 1
            saves[storage] = left
            if not left:
                self._let_storage_go(storage)
        for storage in operation.outside if not self.unpacks else ():
            self.outside[storage] -= 1
            if not self.outside[storage] and storage in self.dying:
                self._free_kept(storage, is_own=False)

    def _unkeep(self, storage: Storage) -> None:
        left = self.saves[storage] - 1
        self.saves[storage] = left
        if not left:
            self._let_storage_go(storage)

    def _let_storage_go(self, storage: Storage) -> None:
        """Nothing of this segment keeps it any more."""
        is_own = storage.segment == self.segment.index
        if (storage.kept_by_maker and not is_own) or storage in self.handed_over:
            return
        self._free_kept(storage, is_own=is_own)

    def _free_kept(self, storage: Storage, *, is_own: bool) -> None:
        size = storage.num_bytes
        self.saved -= size
        if not is_own and storage is not self.segment.logits:
            self.earlier -= size
        self._free(storage, size)

    def _end_kernel(self) -> None:
        """A kernel has written all that it writes: what it alone still read goes."""
        for operation in self.read:
            self._let_go(operation)
        self.read.clear()

    def _let_go_of_given(self, operation: Operation) -> None:
        """With the last kept tensor goes what the recomputation was given: the segment's input."""
        if not self.holders or not keeps_something(operation):
            return
        self.holders -= 1
        if not self.holders:
            for storage in self.segment.given:
                self._unkeep(storage)

    # -- what is computed again ------------------------------------------------------------------

    def _recompute(self, again: ForwardProfile) -> None:
        """Run a checkpointed segment's forward pass again.

        Modules whose backward pass has begun by then are noted where it has run.
        """
        self.again = None
        self._rise(again.peak)
        recomputed = again.end.total_bytes
        before = len(self.events)
        self.marks += [(before + start, ~number) for number, start in enumerate(again.starts)]
        self.events += again.events
        self.live += recomputed
        self.saved += recomputed

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
            stages: list[Sequence[Change]] = [[]]
            if operation.forward_scratch or operation.tiles is not None:
                before, *stages = forward_stages(operation)
                self._play(before)
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
                if len(stages) > 1:
                    self._play(stages.pop(0))
            if operation.multiplies:
                self.events.append((WORKSPACE, 0))
            for stage in stages:
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

    # -- one operation ---------------------------------------------------------------------------

    def _step(self, operation: Operation) -> None:
        """Call one node: formula, sums and casts, then its inputs and saved variables go."""
        incoming = self._incoming(operation)
        if self.is_compiled and operation.kind in EXTERN_KERNELS:
            self._end_kernel()
        if not incoming:
            self._let_go(operation)
            self._let_go_of_given(operation)
            return
        made, products = self._formula(operation, incoming[0])
        # What was recomputed is let go by the formula itself, before the engine casts or sums
        # what the formula returned (``validate_outputs``).
        # So does it with what hooks give it.
        unpacks = self.unpacks or bool(operation.handed)
        if unpacks and not self.is_compiled:
            self._let_go(operation)
        if len(products) > 1:  # validated in the order of the inputs, whatever the formula's was
            place = _places(operation.inputs)
            products.sort(key=lambda each: place[each[1]])
        for product, tensor, buffer in products:
            summed = self._summed(product, operation.outputs[0], tensor, buffer)
            self._allocate(summed, summed.num_bytes)
            if tensor.by_column and not product.in_columns:
                self._sum_rows(tensor, operation.outputs[0])
            if product is not incoming[0]:
                self._free(product, product.num_bytes)
            if summed is not buffer:
                self._allocate(buffer, buffer.num_bytes)
                self._free(summed, summed.num_bytes)
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
        if self.holders:
            self._let_go_of_given(operation)
        if len(made) > 1:
            # Next edges are served in the order of the inputs, whatever order the formula went in.
            place = _places(operation.inputs)
            made.sort(key=lambda each: place[each[0]])
            if _flattens(operation):
                # The rows were seen before the weight was turned: theirs is the older node, and goes last.
                made.reverse()
            if self.hooked:
                # A module's hook stands before the gradient of its input, but not before its weights'.
                made.sort(key=lambda each: not isinstance(each[0], Parameter))
        for tensor, buffer in made:
            self._deliver(tensor, buffer)

    def _summed(
        self, product: GradientBuffer, out: Tensor, tensor: Tensor, buffer: GradientBuffer
    ) -> GradientBuffer:
        """What is summed to a tensor's shape: in the result's dtype, and cast only then, where the
        tensor has another and the formula did not give it that (torch/csrc/autograd/engine.cpp, ``validate_outputs``)."""
        if self.is_compiled or tensor.dtype is out.dtype or tensor.numel == out.numel:
            return buffer
        if product.num_bytes == allocated_bytes(out.numel, tensor.dtype):
            return buffer
        summed_bytes = allocated_bytes(tensor.numel, out.dtype)
        if product.num_bytes == summed_bytes:
            return buffer  # as many elements: it is only cast
        return GradientBuffer(summed_bytes)

    def _incoming(self, operation: Operation) -> list[GradientBuffer]:
        """The gradients of what it made, as it takes them."""
        buffers = self.buffers
        found = []
        for tensor in operation.outputs:
            buffer = buffers.pop(tensor, None)
            if buffer is not None:
                found.append(buffer)
        return self._in_rows(operation, found) if self.across else found

    def _wanted(self, pairs: Iterable[tuple[Tensor, int]]) -> Iterable[tuple[Tensor, int]]:
        """Of inputs and how their gradients come, those that this pass computes: all."""
        return pairs

    def _formula(self, operation: Operation, incoming: GradientBuffer) -> tuple[Made, Products]:
        """The gradients it returns, and those that are summed or cast afterwards."""
        made: Made = []
        products: Products = []
        stages: list[Sequence[Change]] = []
        if operation.tiles is not None:
            stages = list(operation.tiles.backward)
        elif operation.backward_scratch:
            stages = [*scratch_changes(operation.backward_scratch)]
        if stages:
            self._play(stages.pop(0))
        handed_over = iter(operation.saved)
        for tensor, kind in self._wanted(operation.backward_order()):
            if not tensor.requires_grad or kind in NOT_HANDED:
                continue
            if kind in (_ALIAS, _SEEN, _COLUMNS):
                incoming.references += 1
                incoming.is_view |= kind != _ALIAS
                incoming.in_columns |= kind == _COLUMNS
                made.append((tensor, incoming))
                continue
            if kind == _REUSED:
                reused = _reusable(incoming, gradient_bytes_of(tensor))
                if reused is not None:
                    reused.references += 1
                    made.append((tensor, reused))
                    continue
                kind = _FRESH
            kept = None
            if kind == _SAVED:
                kept = next(handed_over, None)
                if kept is not None:  # else it has come back for this formula
                    self._hand_over(kept)
                kind = _FRESH
            if made and len(stages) > 1:
                self._play(stages.pop(0))
            size = _whole_bytes(tensor) if kind == _WHOLE else gradient_bytes_of(tensor)
            buffer = GradientBuffer(size, is_view=kind == _VIEW or _drops_rows(tensor, kind))
            # A cast keeps the order in which elements lie.
            buffer.is_turned = kind == _TURNED or (incoming.is_turned and operation.kind is _TO)
            made.append((tensor, buffer))
            if kept is not None:
                self.handed_over[kept] = buffer
            if kind == _SUMMED and operation.in_python:
                # The formula sums by itself, and returns what is no view.
                buffer.is_view = False
                self._allocate(buffer, size)
                if tensor.by_column:
                    self._sum_rows(tensor, operation.outputs[0])
            elif kind == _SUMMED:
                products.append((incoming, tensor, buffer))
            elif kind > 0:
                product = GradientBuffer(kind)
                products.append((product, tensor, buffer))
                self._allocate(product, kind)
            else:
                self._allocate(buffer, size)
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
        asked = columns, out.numel // columns, out.numel * out.dtype.num_bytes
        found = self.sums[asked] = column_sum_scratch(*asked, self.device)
        for blocks in found:
            self._play(scratch_changes(blocks)[-1])

    def _hand_over(self, storage: Storage) -> None:
        """A gradient made in the forward pass: what was kept becomes the gradient itself."""
        self.saved -= storage.num_bytes
        self._free(storage, storage.num_bytes)


BIASED = 3
"""Inputs of a linear layer's product with its bias."""
_SUMMED, _ALIAS, _FRESH = int(Gradient.SUMMED), int(Gradient.ALIAS), int(Gradient.FRESH)
_SAVED, _VIEW, _WHOLE = int(Gradient.SAVED), int(Gradient.VIEW), int(Gradient.WHOLE)
_REUSED, _SEEN, _COLUMNS = int(Gradient.REUSED), int(Gradient.SEEN), int(Gradient.COLUMNS)
_TURNED, _TO = int(Gradient.TURNED), OperationKind.TO


def _drops_rows(tensor: Tensor, kind: int) -> bool:
    """Whether what is summed over rows is seen without them: a bias (ATen/ExpandUtils.h, ``sum_to``)."""
    return kind == _SUMMED and isinstance(tensor, Parameter) and len(tensor.shape) == 1


def _flattens(operation: Operation) -> bool:
    """Whether it is a product with a bias that sees its input as rows (ATen/native/Linear.cpp,
    ``_flatten_nd_linear``)."""
    if operation.kind is not OperationKind.LINEAR or len(operation.inputs) != BIASED:
        return False
    return operation.gradients[0] == _VIEW


def _reusable(buffer: GradientBuffer, num_bytes: int) -> GradientBuffer | None:
    """What a fused kernel reads last and writes over (torch/_inductor/scheduler.py, in-place buffers)."""
    if buffer.references > 1:
        return None
    for part in buffer.parts or (buffer,):
        if part.references == 1 and part.num_bytes == num_bytes and not part.is_view:
            return part
    return None


def _total(buffers: "dict[Tensor, GradientBuffer]") -> int:
    """Each once: what several see parts of is one block."""
    return sum(
        buffer.num_bytes for buffer in {id(each): each for each in buffers.values()}.values()
    )


def _whole_bytes(tensor: Tensor) -> int:
    assert isinstance(tensor, Parameter)
    return allocated_bytes(tensor.num_weights, tensor.dtype)


def _places(inputs: Sequence[Tensor]) -> dict[Tensor, int]:
    """Where each input stands first: a stack of a batch's sequences has thousands."""
    return {
        tensor: place
        for place, tensor in zip(reversed(range(len(inputs))), reversed(inputs), strict=True)
    }
