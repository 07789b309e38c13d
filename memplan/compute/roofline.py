"""The time of a model's own operations, each on a roofline, read off the tape.

A product takes what its shape lets it reach, attention what its kernel does, everything else the bytes
that it reads and writes. Backward, an operation reads the gradients of what it made and what it kept,
and writes the gradients of its inputs. In a compiled region what stands between two kernels is one
kernel, and only what is really written moves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from memplan.compute.attended import AttentionTimes
from memplan.compute.flops import early_stop, recomputed_positions
from memplan.compute.host import CPU_PRICES
from memplan.compute.multiplied import ProductTimes
from memplan.compute.narrow import NarrowTimes
from memplan.compute.near import NearTensors
from memplan.compute.product_shapes import has_norm, product_shape, second_operand
from memplan.compute.products import Shape
from memplan.compute.rates import Rates
from memplan.compute.traffic import (
    arriving_bytes,
    backward_bytes,
    fused_backward_bytes,
    fused_bytes,
    kernels_of,
    made_bytes,
    num_bytes_of,
    read_bytes,
    scratch_bytes,
    unpacking_bytes,
    unpacking_kernels,
)
from memplan.compute.work import Message, SegmentWork, Work
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import (
    ATTENTION_KERNELS,
    EXTERN_KERNELS,
    OUTPUT_LOSSES,
    OperationKind,
)
from memplan.graph.core.segments import Gradient, Operation, Segment, Tiles
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.remembered import OF_TAPES
from memplan.model.spec import ModelSpec
from memplan.training.compilation import Compilation
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Send

VIEWS = frozenset(
    {
        OperationKind.VIEW, OperationKind.SLICE, OperationKind.SPLIT, OperationKind.EXPAND,
        OperationKind.TRANSPOSE, OperationKind.COPY_TO_RANKS, OperationKind.ARGUMENTS,
        OperationKind.GIVEN, OperationKind.EMPTY, OperationKind.NEW_EMPTY,
        OperationKind.VIEW_AS_REAL, OperationKind.OUTPUTS_TO_FP32,
    }
)  # fmt: skip
"""What launches nothing in forward."""
SLOW_KINDS: Mapping[OperationKind, tuple[float, float]] = {
    OperationKind.LAYER_NORM: (0.68, 0.40), OperationKind.RMS_NORM: (0.68, 0.40),
    OperationKind.SOFTMAX: (0.60, 0.50), OperationKind.SAFE_SOFTMAX: (0.60, 0.50),
    OperationKind.LOG_SOFTMAX: (0.75, 0.57), OperationKind.CROSS_ENTROPY: (0.75, 0.57),
    OperationKind.NLL_LOSS: (0.75, 0.57), OperationKind.DROPOUT: (0.85, 0.85),
    OperationKind.EMBEDDING: (0.90, 0.50), OperationKind.SUM: (0.90, 0.90),
}  # fmt: skip
"""What reads rows twice, or sums over columns too: of the rate of element-wise kernels, what they reach forward
and backward (``tests/measured/h100_rates.json``)."""
NORM_BYTES = (2, 3)
"""Tensors that a norm reads and writes forward, and backward, where its gradient comes too."""
_PLAIN = (1.0, 1.0)


def segment_work(tape: Tape, model: ModelSpec, rates: Rates) -> Sequence[SegmentWork]:
    """The time of each segment's passes, one repetition of each; remembered."""
    return _segment_work(_Same(tape), _Same(model), rates)


class _Same:
    """A value that is told apart by itself."""

    __slots__ = ("value",)

    def __init__(self, value: Tape | ModelSpec) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@OF_TAPES.remembered(maxsize=256)
def _segment_work(tape: _Same, model: _Same, rates: Rates) -> Sequence[SegmentWork]:
    assert isinstance(tape.value, Tape)
    assert isinstance(model.value, ModelSpec)
    found = [_Reader(tape.value, each, model.value, rates).read() for each in tape.value.segments]
    if found:
        found[0].forward.host_s += CPU_PRICES.start
    return found


class _Reader:
    """Reads one segment."""

    def __init__(self, tape: Tape, segment: Segment, model: ModelSpec, rates: Rates) -> None:
        self.tape = tape
        self.segment = segment
        self.rates = rates
        self.is_compiled = segment.compiled is not Compilation.NONE
        self.attention = AttentionTimes(tape, segment, model, rates)
        self.narrow = NarrowTimes(tape, rates)
        self.products = ProductTimes(tape, rates, self.narrow)
        self.near = NearTensors(rates)

    def read(self) -> SegmentWork:
        operations = self.segment.operations
        again = recomputed_positions(self.segment)
        stop = early_stop(self.segment)
        weights = {
            tensor for each in operations for tensor in each.inputs if isinstance(tensor, Parameter)
        }
        found = SegmentWork(
            forward=self._forward(operations),
            backward=self._backward(operations),
            again=self._forward(
                [each for place, each in enumerate(operations) if place in again and place < stop]
            )
            if again
            else Work(),
            num_weights=len(weights),
            num_trained=sum(each.requires_grad for each in weights),
            is_unit=self.segment.layer is not None,
        )
        found.forward.away_bytes = found.backward.away_bytes = self._away_bytes()
        self._checkpoint(found)
        return found

    def _checkpoint(self, found: SegmentWork) -> None:
        """What the host does for checkpointing itself: hooks on every tensor that is let go."""
        if not self.segment.checkpointed:
            return
        host = CPU_PRICES
        num_saved = sum(len(each.saved) for each in self.segment.operations)
        found.forward.host_s += host.checkpoint + num_saved * host.saved
        found.again.host_s += host.checkpoint_back + num_saved * host.saved_back

    def _away_bytes(self) -> int:
        """Of what lies in CPU RAM between the passes."""
        segment = self.segment
        away = {segment.input_away}
        if not segment.checkpointed:
            away.update(each for operation in segment.operations for each in operation.handed)
        return sum(each.num_bytes for each in away if each is not None)

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self, operations: Sequence[Operation]) -> Work:
        work = Work()
        if not self.is_compiled:
            for operation in operations:
                self._take_turns(work, operation, self._run)
            return work
        for kernel in kernels_of(operations):
            if kernel[0].kind in EXTERN_KERNELS:
                self._run(work, kernel[0])
            else:
                self._move(work, fused_bytes(kernel))
                work.host_s += CPU_PRICES.compiled
        work.host_s += CPU_PRICES.region
        return work

    def _take_turns(
        self, work: Work, operation: Operation, run: Callable[[Work, Operation], None]
    ) -> None:
        """One turn of a loop may stand for many, each with launches of its own."""
        before_s = work.host_s
        run(work, operation)
        if operation.turns > 1:
            others = operation.turns - 1
            work.host_s += others * (work.host_s - before_s)
            work.memory_s += others * self.rates.kernel_s * (operation.kind not in VIEWS)

    def _run(self, work: Work, operation: Operation) -> None:
        kind = operation.kind
        if operation.tiles is not None:
            self._run_tiles(work, operation.tiles, back=operation.tiles.forward_gradients)
            return
        if kind in VIEWS:
            work.host_s += 0.0 if self.is_compiled else CPU_PRICES.view
            return
        work.host_s += self._host_seconds(operation)
        sends = operation.sends.forward
        before_s = work.device_s if sends else 0.0
        scratch = _scratch(operation, operation.forward_scratch)
        slow = SLOW_KINDS.get(kind, _PLAIN)[0]
        if kind in _SENT:
            if not sends:
                self._send(work, operation, _SENT[kind][0])
            self._move(work, 2 * scratch)
        elif not operation.flops:
            read = read_bytes(operation)
            moved = read + made_bytes(operation) - self.near.spared(operation, read)
            self._move(work, moved / slow + 2 * scratch)
            if kind is OperationKind.UNPACK and not self.rates.unpacks_at_once:
                self._unpack(work, operation.inputs[0])
        elif kind in ATTENTION_KERNELS:
            work.attention_s += self.attention.seconds(operation, 0)
        elif kind in OUTPUT_LOSSES:
            self._multiply_out(work, operation)
        else:
            work.products_s += self.products.seconds(operation, product_shape(operation))
            self._norm_within(work, operation, NORM_BYTES[0], 0)
            self.narrow.quantize(work, operation)
            self._move(work, 2 * scratch)
        self.near.keep(operation)
        if sends:
            self._send_within(work, sends, work.device_s - before_s)

    def _unpack(self, work: Work, weight: Tensor) -> None:
        """What lies between a weight's codes and its value."""
        self._move(work, unpacking_bytes(weight))
        count = unpacking_kernels(weight)
        work.host_s += count * CPU_PRICES.kernel
        work.memory_s += count * self.rates.kernel_s

    def _norm_within(self, work: Work, operation: Operation, tensors: int, direction: int) -> None:
        """A norm that is one module with the product behind it reads and writes by itself."""
        if has_norm(operation):
            slow = SLOW_KINDS[OperationKind.LAYER_NORM][direction]
            self._move(work, tensors * num_bytes_of(operation.inputs[0]) / slow)

    def _run_tiles(self, work: Work, tiles: Tiles, *, back: bool) -> None:
        """One tile after the other forward, and with ``back`` each backward too."""
        one = Work()
        operations = tiles.segment.operations
        for each in operations:
            self._run(one, each)
        for each in reversed(operations) if back else ():
            if each.gradients:
                self._run_back(one, each)
        work.products_s += tiles.count * one.products_s
        work.memory_s += tiles.count * one.memory_s
        work.host_s += tiles.count * one.host_s

    def _host_seconds(self, operation: Operation) -> float:
        """What it takes to ask for an operation's kernel in the forward pass."""
        host = CPU_PRICES
        if self.is_compiled:
            return host.compiled
        if operation.kind in ATTENTION_KERNELS:
            return host.attention
        return host.product if operation.flops else host.kernel

    def _host_backward_s(self, operation: Operation, moved: int) -> float:
        host = CPU_PRICES
        if self.is_compiled:
            return host.compiled
        if operation.kind in ATTENTION_KERNELS:
            return host.attention_back
        return host.kernel_back if moved else host.alias

    def _move(self, work: Work, num_bytes: float) -> None:
        if num_bytes:
            work.memory_s += num_bytes / self.rates.bytes_per_s + self.rates.kernel_s

    def _send(self, work: Work, operation: Operation, kind: ExchangeKind | None) -> None:
        if kind is None:
            return
        sizes = [num_bytes_of(each) for each in (*operation.inputs[:1], *operation.outputs[:1])]
        work.messages.append(Message(kind, max(sizes)))

    def _send_within(self, work: Work, sends: Iterable[Send], own_s: float) -> None:
        """What an operation sends, beside its own computing as far as that lasts."""
        work.messages += [
            Message(each.kind, each.num_bytes, each.group, each.beside * own_s) for each in sends
        ]

    def _multiply_out(self, work: Work, operation: Operation) -> None:
        """Output matrix and loss in one: logits chunk by chunk, and all gradients at once."""
        x, weight = operation.inputs[:2]
        num_products = 1 + sum(each.requires_grad for each in (x, weight))
        width = weight.shape[-1] if isinstance(weight, Parameter) else 1
        rows, vocabulary = x.numel // width, weight.numel // width
        each = self.products.seconds(operation, Shape(1, rows, vocabulary, width))
        work.products_s += num_products * each
        self._move(work, 4 * x.dtype.num_bytes * rows * vocabulary)

    # -- backward --------------------------------------------------------------------------------

    def _backward(self, operations: Sequence[Operation]) -> Work:
        work = Work()
        graded = [each for each in reversed(operations) if each.gradients]
        if self.is_compiled:
            for kernel in kernels_of(graded):
                if kernel[0].kind in EXTERN_KERNELS:
                    self._run_back(work, kernel[0])
                else:
                    self._move(work, fused_backward_bytes(kernel))
                    work.host_s += CPU_PRICES.compiled
            work.host_s += CPU_PRICES.region
            return work
        for operation in graded:
            self._take_turns(work, operation, self._run_back)
        self._add_up(work, graded)
        return work

    def _run_back(self, work: Work, operation: Operation) -> None:
        kind = operation.kind
        if operation.tiles is not None:
            if operation.tiles.runs_again:
                self._run_tiles(work, operation.tiles, back=True)
            return
        own = 0
        if not operation.flops or kind in ATTENTION_KERNELS:
            own = backward_bytes(operation)
            work.host_s += self._host_backward_s(operation, own)
        sends = operation.sends.backward
        before_s = work.device_s if sends else 0.0
        scratch = _scratch(operation, operation.backward_scratch)
        if kind in _SENT:
            if not sends and (kind is not OperationKind.ALL_GATHER or scratch):
                # Columns that were joined are cut out again: nothing is sent.
                self._send(work, operation, _SENT[kind][1])
            self._move(work, 2 * scratch)
        elif kind is OperationKind.COPY_TO_RANKS:
            self._send(work, operation, ExchangeKind.ALL_REDUCE)
        elif kind in OUTPUT_LOSSES:
            self._move(work, 2 * sum(num_bytes_of(each) for each in operation.inputs[:2]))
        elif kind in ATTENTION_KERNELS:
            work.attention_s += self.attention.seconds(operation, 1)
            self._move(work, 2 * scratch)
        elif operation.flops:
            self.narrow.quantize_back(work, operation)
            self._multiply_back(work, operation)
            self._norm_within(work, operation, NORM_BYTES[1], 1)
            self._move(work, 2 * scratch)
        else:
            slow = SLOW_KINDS.get(kind, _PLAIN)[1]
            moved: float = own
            arriving = arriving_bytes(operation)
            if 2 * arriving <= self.rates.cache.num_bytes:
                moved -= self.near.saved_share * min(arriving, moved)
            self._move(work, moved / slow + 2 * scratch)
        if sends:
            self._send_within(work, sends, work.device_s - before_s)

    def _multiply_back(self, work: Work, operation: Operation) -> None:
        host = CPU_PRICES
        batch, m, n, k = product_shape(operation)
        turned = (Shape(batch, m, k, n), Shape(batch, k, n, m))
        factors = (operation.inputs[0], second_operand(operation))
        for tensor, kind in zip(operation.inputs, operation.gradients, strict=False):
            if not tensor.requires_grad or kind == Gradient.NONE:
                continue
            if tensor in factors:
                place = factors.index(tensor)
                work.products_s += self.products.seconds(
                    operation, turned[place], back=True, sums_rows=place == 1
                )
                work.host_s += host.compiled if self.is_compiled else host.product_back
            elif not has_norm(operation):
                # A bias.
                self._move(work, made_bytes(operation))

    def _add_up(self, work: Work, graded: Sequence[Operation]) -> None:
        """What several operations read has several gradients, which are added up."""
        uses: dict[Tensor, int] = {}
        for operation in graded:
            for tensor, kind in zip(operation.inputs, operation.gradients, strict=False):
                if tensor.requires_grad and kind != _NO_GRADIENT:
                    uses[tensor] = uses.get(tensor, 0) + 1
        for tensor, count in uses.items():
            if count > 1 and not isinstance(tensor, Parameter):
                for _ in range(count - 1):
                    self._move(work, 3 * num_bytes_of(tensor))
                    work.host_s += CPU_PRICES.sum_back


_NO_GRADIENT = int(Gradient.NONE)
_SENT = {
    OperationKind.ALL_GATHER: (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER),
    OperationKind.REDUCE_SCATTER: (ExchangeKind.REDUCE_SCATTER, ExchangeKind.ALL_GATHER),
    OperationKind.ALL_REDUCE: (ExchangeKind.ALL_REDUCE, None),
}
"""What operations of a split model send, forward and backward."""


def _scratch(operation: Operation, scratch: Sequence[int]) -> int:
    """A pass's temporaries, but for what its collectives write, which is in their time, and narrow copies, which are told apart [bytes]."""
    if not scratch:
        return 0
    is_product = operation.kind is OperationKind.LINEAR
    if is_product and (operation.sends is not NO_SENDS or operation.outputs[0].dtype is DType.FP8):
        return 0
    return scratch_bytes(scratch)
