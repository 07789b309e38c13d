"""torch.compile on the tape: what inductor's kernels write, and what they keep for backward.

A compiled region has the operations of its class, but most of them are fused: what stands between two
operations of one kernel is never written. What backward needs is either kept or computed again inside the
kernel that needs it, and torch chooses so that the fewest bytes are kept: a minimum cut through the
region's dataflow (torch 2.13, torch/_functorch/partitioners.py, ``solve_min_cut``), with what may not be
computed again (products, attention, random numbers, reductions, what a product in backward reads) cut at
itself. Here the same cut is made through the operations of a segment.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import (
    ATTENTION_KERNELS,
    EXTERN_KERNELS,
    IN_PLACE_KINDS,
    RANDOM_KINDS,
    UNFUSIBLE_KINDS,
    OperationKind,
)
from memplan.graph.core.segments import RESULT, Gradient, Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.graph.mincut import FlowNetwork
from memplan.training.compilation import Compilation

_PASSED = (Gradient.ALIAS, Gradient.SEEN, Gradient.COLUMNS)
"""Gradients that are handed on as they are."""
REDUCTION_FACTOR = 4
"""So many times smaller than what it is computed from: a reduction, which is kept
(``should_ban_recomputation``)."""
DISTANCE_WEIGHT = 1.1
MAX_DISTANCE = 100
"""What is further from the backward pass counts more (``get_node_weight``)."""


def compile_tape(tape: Tape) -> None:
    """Compile what the options say: every layer, or every segment as a part of one graph."""
    scope = tape.options.compile
    if scope is Compilation.LAYER:
        shares = tape.options.tensor_parallel is not None
        for segment in tape.segments:
            if segment.is_layer:
                _compile(segment, Place.ALONE, keeps_codes=shares)
        return
    place = Place.FIRST
    returned = frozenset(tensor.storage for tensor in tape.returned)
    is_recomputed = False
    for segment in tape.segments[: tape.compiled_before]:
        is_later = place is Place.LATER or segment.repeat > 1
        _compile(
            segment,
            Place.LATER if is_later else Place.FIRST,
            returned=returned,
            keeps_input=segment.checkpointed or not is_recomputed,
        )
        is_recomputed = segment.checkpointed
        if segment.is_layer:
            place = Place.LATER
    _return_logits(tape)
    _add_to_tied_table(tape)


class Place(Enum):
    """Where in its graph a segment stands."""

    ALONE = "alone"
    """It is all of it."""
    FIRST = "first"
    """The first layer of it, or what stands before."""
    LATER = "later"


def _compile(
    segment: Segment,
    place: Place,
    *,
    returned: frozenset[Storage] = frozenset(),
    keeps_input: bool = True,
    keeps_codes: bool = False,
) -> None:
    """Give the segment's operations what they keep, write and hand back once they are compiled.

    What the graph returns is written, and what the last of checkpointed layers makes is made again with
    it (``cleanup_recompute_tags`` keeps only what another checkpointed one is given).
    """
    if not segment.operations:
        return
    region = _Region(
        segment, place, returned=returned, keeps_input=keeps_input, keeps_codes=keeps_codes
    )
    kept = region.minimum_cut()
    segment.compiled = Compilation.LAYER if place is Place.ALONE else Compilation.MODEL
    _Rewriting(region, kept).run()


def _return_logits(tape: Tape) -> None:
    """What the model returns beside the loss gets a gradient of zeros, which loss's own is added to.

    torch 2.13: an ``autograd.Function``'s gradients are materialized. Where the loss is a graph of its
    own (``HeadSpec.unnamed_loss``), the logits do have a gradient.
    """
    if tape.loss_apart:
        return
    zeros = [
        allocated_bytes(each.numel, each.dtype) for each in tape.returned if each.requires_grad
    ]
    for operation in reversed(tape.segments[-1].operations):
        if operation.kind in EXTERN_KERNELS:
            return
        if zeros and Gradient.REUSED in operation.gradients:
            operation.backward_scratch = (*zeros, RESULT)
            return


def _add_to_tied_table(tape: Tape) -> None:
    """A tied table's gradient is that of the embedding, to which the output matrix's product is added.

    Inductor makes one ``addmm`` of sum and product, so that the product waits, and with it the gradient
    of the logits (torch 2.13, _inductor/fx_passes/post_grad.py, ``addmm``). A third use prevents it.
    """
    uses: dict[Parameter, list[Operation]] = {}
    for segment in tape.segments:
        for operation in segment.operations:
            for tensor in operation.inputs:
                if isinstance(tensor, Parameter) and operation.gradients:
                    uses.setdefault(tensor, []).append(operation)
    for parameter, operations in uses.items():
        kinds = [operation.kind for operation in operations]
        if parameter.requires_grad and kinds == [OperationKind.EMBEDDING, OperationKind.LINEAR]:
            lookup, product = operations
            if len(product.inputs) == 2:
                _postpone(lookup, product)


def _postpone(lookup: Operation, product: Operation) -> None:
    """Let the product's weight gradient be made with the lookup's."""
    made, logits = lookup.outputs[0].storage, product.outputs[0]
    waiting = Tensor(
        logits.numel, logits.dtype, Storage(0, made.segment, made.last_read), requires_grad=True
    )
    lookup.outputs = (*lookup.outputs, waiting)
    product.inputs = (*product.inputs, waiting)
    product.gradients = (product.gradients[0], Gradient.NONE, Gradient.ALIAS)


class _Value:
    """One tensor of a region's dataflow; views share it."""

    __slots__ = (
        "is_banned",
        "is_codes",
        "is_fusible",
        "makers",
        "needed_by_product",
        "num_bytes",
        "number",
        "position",
        "readers",
        "storage",
        "wanted",
    )  # fmt: skip

    def __init__(
        self, number: int, storage: Storage, num_bytes: int, position: int, makers: "list[_Value]"
    ) -> None:
        self.number = number
        self.storage = storage
        self.num_bytes = num_bytes
        self.position = position
        """The operation that makes it; -1: the region is given it."""
        self.makers = makers
        """What it can be computed from again."""
        self.readers: list[int] = []
        self.is_fusible = False
        self.is_codes = False
        """It is laid out anew for a product in backward, by a kernel that can be fused with it."""
        self.is_banned = False
        """It may not be computed again."""
        self.wanted = False
        """A backward formula reads it."""
        self.needed_by_product = False
        """One that is a kernel of its own does, so that it would have to be written."""


class _Region:
    """The dataflow of a segment."""

    def __init__(
        self,
        segment: Segment,
        place: Place,
        *,
        returned: frozenset[Storage],
        keeps_input: bool,
        keeps_codes: bool,
    ) -> None:
        self.segment = segment
        self.keeps_codes = keeps_codes
        """Codes have scales of all ranks together: they are not made again."""
        self.place = place
        self.returned = returned
        self.values: list[_Value] = []
        self.made: list[list[_Value]] = []
        """For each operation."""
        self.needs: list[list[_Value]] = []
        """For each operation, what its backward formula reads."""
        self.current: dict[Storage, _Value] = {}
        self.casts: dict[tuple[_Value | Parameter, DType] | None, _Value] = {}
        self.output: _Value | None = None
        given = segment.input
        if given is not None and given.storage.segment >= 0 and keeps_input:
            value = self._add(given, -1, [])
            value.is_fusible = place is not Place.ALONE
            value.is_banned = True
        for position, operation in enumerate(segment.operations):
            self._read(position, operation)
        if segment.output is not None:
            self.output = self.current.get(segment.output.storage)
        self._ban()

    def _add(self, tensor: Tensor, position: int, makers: list[_Value]) -> _Value:
        size = tensor.numel * tensor.dtype.num_bytes
        is_narrow = 0 < tensor.storage.num_bytes < size
        size = tensor.storage.num_bytes if is_narrow else size
        value = _Value(len(self.values), tensor.storage, size, position, makers)
        value.is_codes = is_narrow or tensor.dtype is DType.FP8
        self.values.append(value)
        self.current[tensor.storage] = value
        return value

    def _read(self, position: int, operation: Operation) -> None:
        kind = operation.kind
        read = _found(self.current, (tensor.storage for tensor in operation.inputs))
        for value in read:
            value.readers.append(position)
        saved = {storage: self.current.get(storage) for storage in operation.saved}
        given = {tensor.storage for tensor in operation.inputs}
        made: list[_Value] = []
        self.made.append(made)
        self.needs.append([])
        if self._repeats(operation, read):
            return
        largest = max((tensor.numel for tensor in operation.outputs), default=0)
        # Statistics and masks first: the result is computed from them too.
        for tensor in sorted(operation.outputs, key=lambda each: each.numel * each.dtype.num_bytes):
            is_random = kind in RANDOM_KINDS and tensor.dtype is DType.BOOL
            if tensor.storage in given:
                if kind not in IN_PLACE_KINDS:
                    continue
            elif tensor.storage.segment != self.segment.index:
                continue
            makers = [] if is_random else list(read)
            if tensor.numel == largest and not is_random:
                makers += made
            value = self._add(tensor, position, makers)
            value.is_fusible = kind not in UNFUSIBLE_KINDS
            value.is_banned = is_random or kind in UNFUSIBLE_KINDS or self._is_far(operation)
            value.is_banned |= tensor.storage in self.returned
            value.is_banned |= self.keeps_codes and value.is_codes
            made.append(value)
        key = self._cast_key(operation, read)
        if key is not None and made:
            self.casts[key] = made[0]
        if operation.gradients:
            self._need_saved(position, operation, saved, made)

    def _need_saved(
        self,
        position: int,
        operation: Operation,
        saved: Mapping[Storage, "_Value | None"],
        made: "list[_Value]",
    ) -> None:
        """What an operation's backward formula reads, as it was then."""
        if operation.kind is OperationKind.RELU:
            self._need(self._sign(position, operation, made[0]), position)
            return
        for storage, earlier in saved.items():
            is_made_here = earlier is None or operation.saves_output
            wanted = self.current.get(storage) if is_made_here else earlier
            if wanted is not None:
                self._need(wanted, position)

    def _need(self, value: _Value, position: int) -> None:
        """An operation's backward formula reads it."""
        self.needs[position].append(value)
        value.wanted = True
        if self.segment.operations[position].kind in EXTERN_KERNELS and not value.is_codes:
            value.needed_by_product = True

    def _sign(self, position: int, operation: Operation, result: _Value) -> _Value:
        """Where a rectified tensor is zero, which its backward formula asks, a byte for an element."""
        tensor = operation.outputs[0]
        storage = Storage(allocated_bytes(tensor.numel, DType.BOOL), self.segment.index, position)
        sign = Tensor(tensor.numel, DType.BOOL, storage)
        operation.outputs = (*operation.outputs, sign)
        value = self._add(sign, position, [result])
        value.is_fusible = True
        result.readers.append(position)
        self.made[position].append(value)
        return value

    def _repeats(self, operation: Operation, read: list[_Value]) -> bool:
        """Whether it makes what is there already: a second cast, or a copy of what attention has laid
        out as it is wanted. Its output stands for the other then."""
        out = operation.outputs[0] if operation.outputs else None
        if out is None or out.storage.segment != self.segment.index:
            return False
        if operation.kind is OperationKind.CLONE and read and self._lies_in_rows(read[0]):
            self.current[out.storage] = read[0]
            return True
        key = self._cast_key(operation, read)
        if key not in self.casts:
            return False
        self.current[out.storage] = self.casts[key]
        return True

    def _lies_in_rows(self, value: _Value) -> bool:
        """Whether it is what attention made of queries that were joined with nothing.

        Eager ``cat`` lays them out anew, head by head, and attention's output with them; inductor passes
        over empty parts (torch 2.13, _inductor/decomposition.py, ``cat``).
        """
        operations = self.segment.operations
        if value.position < 0 or operations[value.position].kind not in ATTENTION_KERNELS:
            return False
        query: _Value | None = value.makers[0] if value.makers else None
        while query is not None and query.position >= 0:
            operation = operations[query.position]
            if operation.kind is OperationKind.CAT:
                return sum(tensor.numel > 0 for tensor in operation.inputs) == 1
            if operation.kind is not OperationKind.TO:
                return False
            query = query.makers[0] if query.makers else None
        return False

    def _cast_key(
        self, operation: Operation, read: list[_Value]
    ) -> tuple[_Value | Parameter, DType] | None:
        """What a cast copies, and into what."""
        if operation.kind is not OperationKind.TO or not operation.inputs:
            return None
        source = operation.inputs[0]
        if isinstance(source, Parameter):
            return source, operation.outputs[0].dtype
        return (read[0], operation.outputs[0].dtype) if read else None

    def _is_far(self, operation: Operation) -> bool:
        """It reads a mask or a table that earlier layers read too: it is not computed again with that."""
        given = self.segment.input
        return self.place is Place.LATER and any(
            0 <= tensor.storage.segment != self.segment.index
            and (given is None or tensor.storage is not given.storage)
            for tensor in operation.inputs
        )

    def fuses(self, position: int) -> bool:
        """Whether an operation can be fused with what reads it."""
        return self.segment.operations[position].kind not in UNFUSIBLE_KINDS

    def joins(self, value: _Value, reader: int) -> bool:
        """Whether a reader can be fused with what makes the value (``is_fusible``)."""
        if self.segment.operations[reader].kind is OperationKind.CAT:
            return True
        return value.is_fusible and self.fuses(reader)

    def _ban(self) -> None:
        for value in self.values:
            taken = sum(each.num_bytes for each in value.makers)
            if value.needed_by_product or value.num_bytes * REDUCTION_FACTOR < taken:
                value.is_banned = True
        for value in self.values:
            self._ban_far_readers(value)

    def _ban_far_readers(self, value: _Value) -> None:
        """What reads a value beyond an operation that is not fused is not computed again with it.

        ``ban_recompute_used_far_apart``: the sums of a residual stream.
        """
        if not value.is_fusible or len(value.readers) < 2:
            return
        first = self._first_unfusible(value.readers)
        for reader in value.readers:
            if reader > first and self.joins(value, reader):
                for each in self.made[reader]:
                    each.is_banned = True

    def _first_unfusible(self, start: Sequence[int]) -> int:
        last = max(start)
        heap = [(position, True) for position in set(start)]
        heapq.heapify(heap)
        seen = set(heap)
        while heap:
            position, is_fused = heapq.heappop(heap)
            if not is_fused:
                return position
            for value in self.made[position]:
                for reader in value.readers:
                    entry = (reader, self.joins(value, reader))
                    if reader <= last and entry not in seen:
                        seen.add(entry)
                        heapq.heappush(heap, entry)
        return last

    def minimum_cut(self) -> frozenset[_Value]:
        """The values to keep."""
        count = len(self.values)
        source, sink = 2 * count, 2 * count + 1
        network = FlowNetwork(2 * count + 2)
        distances = self._distances()
        for value in self.values:
            before, after = 2 * value.number, 2 * value.number + 1
            network.connect(before, after, self._weight(value, distances[value.number]))
            if value.is_banned:
                network.connect(source, before)
            if value.wanted:
                network.connect(after, sink)
            for maker in value.makers:
                network.connect(2 * maker.number + 1, before)
        reaching = network.sink_side(source, sink)
        return frozenset(
            value
            for value in self.values
            if 2 * value.number not in reaching and 2 * value.number + 1 in reaching
        )

    def _weight(self, value: _Value, distance: int) -> int:
        weight = int(value.num_bytes * DISTANCE_WEIGHT ** max(min(distance, MAX_DISTANCE), 1))
        is_written = (
            value.position < 0
            or value is self.output
            or value.needed_by_product
            or not all(self.joins(value, reader) for reader in value.readers)
        )
        return weight if is_written else 2 * weight

    def _distances(self) -> list[int]:
        """How many operations there are to the nearest backward formula."""
        far = 10 * MAX_DISTANCE
        distances = [far] * len(self.values)
        for value in reversed(self.values):
            if value.wanted:
                distances[value.number] = 1
            nearest = distances[value.number] + 1
            for maker in value.makers:
                distances[maker.number] = min(distances[maker.number], nearest)
        return distances


def _found(current: dict[Storage, _Value], storages: Iterable[Storage]) -> list[_Value]:
    return [current[storage] for storage in dict.fromkeys(storages) if storage in current]


class _Rewriting:
    """Changes a region's operations to what the compiled ones do."""

    def __init__(self, region: _Region, kept: frozenset[_Value]) -> None:
        self.region = region
        self.segment = region.segment
        self.kept = kept
        self.written_gradients = self._written_gradients()
        self.last_to_add = self._last_to_add()

    def run(self) -> None:
        """Rewrite them."""
        self._drop_unwritten()
        for position, operation in enumerate(self.segment.operations):
            self._rewrite(position, operation)
        self._settle_lives()

    def _drop_unwritten(self) -> None:
        """Tensors inside a kernel have no bytes."""
        segment = self.segment
        written = {value.storage for value in self.kept}
        if segment.output is not None:
            written.add(self._storage(segment.output))
        written |= self.region.returned
        for operation in segment.operations:
            if operation.kind in EXTERN_KERNELS:
                for tensor in (*operation.inputs, *operation.outputs):
                    written.add(self._storage(tensor))
        for operation in segment.operations:
            for tensor in operation.outputs:
                storage = tensor.storage
                storage.weight_cast = False
                if storage.segment == segment.index and not (storage in written or storage.held):
                    storage.num_bytes = 0

    def _storage(self, tensor: Tensor) -> Storage:
        """Where its value is written, if it is."""
        value = self.region.current.get(tensor.storage)
        return tensor.storage if value is None else value.storage

    def _rewrite(self, position: int, operation: Operation) -> None:
        is_extern = operation.kind in EXTERN_KERNELS
        if operation.gradients:
            needs: dict[Storage, None] = {}
            for value in self.region.needs[position]:
                self._sources(value, needs, set())
            operation.saved = tuple(needs)
            operation.keeps = bool(needs or operation.keeps_weight)
            operation.gradients = tuple(
                self._gradient(position, operation, tensor, kind)
                for tensor, kind in zip(operation.inputs, operation.gradients, strict=True)
            )
        if not is_extern:
            operation.forward_scratch = ()
            operation.backward_scratch = _embedding_scratch(operation)

    def _sources(self, value: _Value, found: dict[Storage, None], seen: set[int]) -> None:
        """What is kept of which a value is computed again."""
        if value in self.kept:
            found[value.storage] = None
            return
        if value.number in seen:
            return
        seen.add(value.number)
        for maker in value.makers:
            self._sources(maker, found, seen)

    def _written_gradients(self) -> set[Tensor]:
        """Tensors whose gradients are written: of what a kernel of its own reads or makes, of what
        the region is given, and what passes on to one of these as it is."""
        found: set[Tensor] = set()
        index = self.segment.index
        for operation in self.segment.operations:
            if operation.kind in EXTERN_KERNELS:
                found.update(operation.inputs)
        for operation in self.segment.operations:
            passes_on = operation.kind in EXTERN_KERNELS
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=False):
                if tensor.storage.segment != index:
                    found.add(tensor)
                if kind in _PASSED and tensor in found:
                    passes_on = True
            if passes_on:
                found.update(operation.outputs)
        return found

    def _last_to_add(self) -> dict[Tensor, int]:
        """The operation whose backward formula completes a written gradient: the earliest."""
        found: dict[Tensor, int] = {}
        for position, operation in enumerate(self.segment.operations):
            if operation.kind in EXTERN_KERNELS:
                continue
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=False):
                if kind not in (Gradient.NONE, *_PASSED):
                    found.setdefault(tensor, position)
        return found

    def _gradient(self, position: int, operation: Operation, tensor: Tensor, kind: int) -> int:
        if kind in (Gradient.NONE, *_PASSED, Gradient.SAVED):
            return kind
        if isinstance(tensor, Parameter) or operation.kind in EXTERN_KERNELS:
            return Gradient.FRESH
        if tensor in self.written_gradients and self.last_to_add[tensor] == position:
            return Gradient.REUSED
        return Gradient.ALIAS

    def _settle_lives(self) -> None:
        """No variable holds anything: what is read last dies there."""
        segment = self.segment
        for position, operation in enumerate(segment.operations):
            for tensor in operation.outputs:
                if tensor.storage.segment == segment.index:
                    tensor.storage.last_read = position
                    tensor.storage.touched = 0
            for tensor in operation.inputs:
                storage = self._storage(tensor)
                if storage.segment == segment.index:
                    storage.last_read = position


def _embedding_scratch(operation: Operation) -> Sequence[int]:
    """Rows are added up in fp32, as large as the whole table (torch 2.13, _inductor/decomposition.py,
    ``embedding_dense_backward``)."""
    if operation.kind is not OperationKind.EMBEDDING or not operation.gradients:
        return ()
    table = operation.inputs[0]
    if not table.requires_grad or not table.dtype.is_half:
        return ()
    return (allocated_bytes(table.numel, DType.FP32), RESULT)
