"""The time of a model's own operations, each on a roofline, read off the tape.

A product takes what its shape lets it reach, attention what its kernel does, everything else the bytes
that it reads and writes. Backward, an operation reads the gradients of what it made and what it kept,
and writes the gradients of its inputs. In a compiled region what stands between two kernels is one
kernel, and only what is really written moves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from memplan.compute.flops import attention_factor, causal_share, early_stop, recomputed_positions
from memplan.compute.host import CPU_PRICES
from memplan.compute.product_shapes import has_norm, product_shape, second_operand
from memplan.compute.products import Shape, alignment_share, product_seconds
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
from memplan.graph.operation_kinds import (
    ATTENTION_KERNELS,
    EXTERN_KERNELS,
    OUTPUT_LOSSES,
    OperationKind,
)
from memplan.graph.segments import Gradient, Operation, Segment, Tiles
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Storage, Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.spec import ModelSpec
from memplan.training.compilation import Compilation
from memplan.training.context_parallel import ContextParallelKind
from memplan.training.exchange import NO_SENDS, ExchangeKind, Send
from memplan.training.fp8 import FP8_RECIPES, Fp8Package
from memplan.training.kernels import AttentionKernel

VIEWS = frozenset(
    {
        OperationKind.VIEW, OperationKind.SLICE, OperationKind.SPLIT, OperationKind.EXPAND,
        OperationKind.TRANSPOSE, OperationKind.COPY_TO_RANKS, OperationKind.ARGUMENTS,
        OperationKind.GIVEN, OperationKind.EMPTY, OperationKind.NEW_EMPTY,
        OperationKind.VIEW_AS_REAL, OperationKind.OUTPUTS_TO_FP32,
    }
)  # fmt: skip
"""What launches nothing in forward."""
HALF_LENGTHS = {True: (500, 1100), False: (150, 450)}
"""Keys at which attention's kernels reach half of their rate forward and backward, with a causal mask, which
cuts tiles, and without (``tests/measured/h100_rates.json``)."""
FULL_HEAD = 128
SINGLE_ATTENTION_SHARE = 1 / 6
"""Of its rate in 16 bits, what a kernel reaches in fp32: three products in TF32, each half as fast."""
ADDED_SHARES = {
    (True, False): (0.72, 0.92), (True, True): (0.69, 0.81),
    (False, False): (0.86, 0.97), (False, True): (0.78, 0.86),
}  # fmt: skip
"""Of its rate, what the memory-efficient kernel reaches forward and backward where a mask is added to the scores,
in 16 bits or not, and the mask trained or not (``efficient`` of ``tests/measured/kernels.json``)."""
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
FUSED_GRADIENT_BYTES = 8
"""Of a weight's gradient, what Megatron's products read and write as they add to the fp32 one (``gradient_accumulation_fusion``)."""
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


@lru_cache(maxsize=256)
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
        self.share = float(causal_share(segment.layer, tape, model))
        """Of the scores, what attention's kernels compute."""
        self.is_compiled = segment.compiled is not Compilation.NONE
        self.formats = FP8_RECIPES.get(tape.options.fp8)
        """Of narrow products; None: there are none."""
        self.near: dict[Storage, None] = {}
        """What the cache holds, the least recent first."""
        self.near_bytes = 0
        cache = rates.cache
        self.saved_share = max(0.0, 1 - rates.bytes_per_s / cache.bytes_per_s)
        """Of the time to read bytes from memory, what the cache saves."""

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
            moved = read + made_bytes(operation) - self._spared(operation, read)
            self._move(work, moved / slow + 2 * scratch)
            if kind is OperationKind.UNPACK and not self.rates.unpacks_at_once:
                self._unpack(work, operation.inputs[0])
        elif kind in ATTENTION_KERNELS:
            self._attend(work, operation, operation.flops * self.share, 0)
        elif kind in OUTPUT_LOSSES:
            self._multiply_out(work, operation)
        else:
            work.products_s += self._product(operation, product_shape(operation))
            self._norm_within(work, operation, NORM_BYTES[0], 0)
            self._quantize(work, operation)
            self._move(work, 2 * scratch)
        self._keep(operation)
        if sends:
            self._send_within(work, sends, work.device_s - before_s)

    def _unpack(self, work: Work, weight: Tensor) -> None:
        """What lies between a weight's codes and its value."""
        self._move(work, unpacking_bytes(weight))
        count = unpacking_kernels(weight)
        work.host_s += count * CPU_PRICES.kernel
        work.memory_s += count * self.rates.kernel_s

    def _spared(self, operation: Operation, read: int) -> float:
        """Of the bytes it reads, as many as would take what the cache saves: what was touched last lies there."""
        near = self.near
        if not near:
            return 0.0
        found = sum([num_bytes_of(each) for each in operation.inputs if each.storage in near])
        return self.saved_share * min(found, read)

    def _keep(self, operation: Operation) -> None:
        """What an operation touches drives what was touched longest ago out of the cache."""
        near, size = self.near, self.rates.cache.num_bytes
        for tensor in (*operation.inputs, *operation.outputs):
            storage = tensor.storage
            num_bytes = storage.num_bytes
            if num_bytes > size:
                near.clear()
                self.near_bytes = 0
            elif storage in near:
                del near[storage]  # and to the end of the line
                near[storage] = None
            else:
                near[storage] = None
                self.near_bytes += num_bytes
        while self.near_bytes > size:
            oldest = next(iter(near))
            del near[oldest]
            self.near_bytes -= oldest.num_bytes

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

    def _attend(self, work: Work, operation: Operation, flops: float, direction: int) -> None:
        rates = self.rates
        third = self.tape.kernels.attention is AttentionKernel.FLASH3
        found = rates.third_flash if third else rates.attention[operation.kind]
        query = operation.inputs[0]
        layer = self.segment.layer
        spec = layer.attention if layer is not None else None
        head = spec.head_dim if isinstance(spec, AttentionSpec) else FULL_HEAD
        length = self._keys(operation, query)
        half_length = HALF_LENGTHS[self.share < 1][direction]
        reached = (found.backward if direction else found.forward) * length / (length + half_length)
        if head < FULL_HEAD:
            reached *= found.half_head ** (FULL_HEAD / head - 1)
        if not query.dtype.is_half:
            reached *= SINGLE_ATTENTION_SHARE
        if operation.kind is OperationKind.EFFICIENT_ATTENTION and len(operation.inputs) > 3:
            trained = operation.inputs[3].requires_grad
            reached *= ADDED_SHARES[query.dtype.is_half, trained][direction]
        seconds = flops / reached
        moved = (read_bytes(operation) + made_bytes(operation)) * (1 + direction)
        work.attention_s += max(seconds, moved / rates.bytes_per_s) + rates.kernel_s

    def _keys(self, operation: Operation, query: Tensor) -> float:
        """Keys to a query in one kernel, by the FLOPs of both products; a ring has a kernel for each rank's."""
        keys = operation.flops / (2 * (query.numel + operation.outputs[0].numel))
        shared = self.tape.options.context_parallel
        if shared is None or shared.kind is not ContextParallelKind.RING:
            return keys
        return keys / shared.degree

    def _product(
        self, operation: Operation, shape: Shape, *, back: bool = False, sums_rows: bool = False
    ) -> float:
        """How long a product takes; ``back``: it makes a gradient; ``sums_rows``: over tokens, which lie row by row (of a weight's
        gradient), so that their number does not cut rows short."""
        rates, first = self.rates, operation.inputs[0]
        is_narrow = self._is_narrow(operation)
        dtype = DType.FP8 if is_narrow else first.dtype
        made = first.dtype.num_bytes if is_narrow else 0
        if sums_rows and self.tape.options.megatron is not None:
            made = FUSED_GRADIENT_BYTES
        rate = rates.rate_of(dtype) / (rates.narrow_back if is_narrow and back else 1.0)
        if dtype is not DType.FP32 and shape.batch == 1:
            rate *= alignment_share(shape.n, shape.m if sums_rows else shape.k)
        in_turn = shape.batch if self._has_product_each(operation) else 1
        return rates.kernel_s + in_turn * product_seconds(
            shape if in_turn == 1 else shape._replace(batch=1),
            dtype.num_bytes,
            rate,
            rates.bytes_per_s,
            rates.num_multiprocessors,
            made,
        )

    def _has_product_each(self, operation: Operation) -> bool:
        """Whether each expert's product is a kernel of its own, which shares no wave with another's.

        TransformerEngine's grouped products are so many of cuBLAS, dealt to a few streams, so that no gap is between them: of
        108 measured on a B200 they take 12 % more or less in the median, as one kernel 20 to 28 % more than said (SimuMax 1.2,
        configs/system/b200_bf16_ceperm.json, ``group_matmul``).
        """
        if self.tape.options.megatron is None:
            return False
        weight = second_operand(operation)
        return isinstance(weight, Parameter) and weight.experts is not None

    def _is_narrow(self, operation: Operation) -> bool:
        """Whether it multiplies codes of 8 bits."""
        formats = self.formats
        if formats is None:
            return False
        if operation.inputs[0].dtype is DType.FP8 or self._quantizes(operation):
            return True
        is_own = formats.package is Fp8Package.TORCHAO
        return is_own and operation.in_python and operation.kind is OperationKind.LINEAR

    def _quantizes(self, operation: Operation) -> bool:
        """Whether a module of TransformerEngine's makes the codes that it multiplies: they are what it keeps."""
        if self.formats is None or operation.kind is not OperationKind.LINEAR:
            return False
        return operation.outputs[0].dtype is DType.FP8

    def _quantize(self, work: Work, operation: Operation) -> None:
        """What is narrowed is read and its codes are written; a norm whose scale is known writes them in place of 16 bits."""
        formats = self.formats
        if formats is None or not self._quantizes(operation):
            return
        x, (kept, *others) = operation.inputs[0], [
            each for each in operation.outputs if each.dtype is DType.FP8
        ]  # fmt: skip
        moved = num_bytes_of(kept) * self._num_copies(operation.sends.forward)
        if not has_norm(operation) or formats.scales_first:
            moved += num_bytes_of(x) * (1 + formats.scales_first)
        else:
            moved -= num_bytes_of(x)
        for each in others:
            moved += num_bytes_of(second_operand(operation)) + num_bytes_of(each)
        work.memory_s += moved / self.rates.bytes_per_s + self.rates.kernel_s * len(others)
        if not has_norm(operation):
            work.memory_s += self.rates.kernel_s
            work.host_s += CPU_PRICES.kernel

    def _quantize_back(self, work: Work, operation: Operation) -> None:
        """The result's gradient, and what is gathered by row and multiplied by column."""
        formats = self.formats
        if formats is None or not self._quantizes(operation):
            return
        gradient = operation.outputs[-1]
        codes = gradient.numel * formats.code_bits // 8
        copies = 2 if self._has_two_copies else 1
        moved = num_bytes_of(gradient) * (1 + formats.scales_first) + copies * codes
        if self._has_two_copies and not formats.by_direction:
            moved += 2 * sum(
                each.num_bytes
                for each in operation.sends.backward
                if each.kind is ExchangeKind.ALL_GATHER
            )
        weight = second_operand(operation)
        if self.tape.options.casts_weights_again:
            moved += num_bytes_of(weight) + copies * weight.numel * formats.code_bits // 8
        self._move(work, moved)
        work.host_s += CPU_PRICES.kernel

    @property
    def _has_two_copies(self) -> bool:
        return bool(self.formats and self.formats.by_direction) or self.tape.options.fp8_transposes

    def _num_copies(self, sends: Sequence[Send]) -> int:
        """Of an input's codes: those by column come with those by row, but where only these are gathered."""
        is_gathered = any(each.kind is ExchangeKind.ALL_GATHER for each in sends)
        by_direction = self.formats is not None and self.formats.by_direction
        return 2 if by_direction or (self._has_two_copies and not is_gathered) else 1

    def _multiply_out(self, work: Work, operation: Operation) -> None:
        """Output matrix and loss in one: logits chunk by chunk, and all gradients at once."""
        x, weight = operation.inputs[:2]
        num_products = 1 + sum(each.requires_grad for each in (x, weight))
        width = weight.shape[-1] if isinstance(weight, Parameter) else 1
        rows, vocabulary = x.numel // width, weight.numel // width
        each = self._product(operation, Shape(1, rows, vocabulary, width))
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
            self._attend(work, operation, operation.flops * self.share * _factor(operation), 1)
            self._move(work, 2 * scratch)
        elif operation.flops:
            self._quantize_back(work, operation)
            self._multiply_back(work, operation)
            self._norm_within(work, operation, NORM_BYTES[1], 1)
            self._move(work, 2 * scratch)
        else:
            slow = SLOW_KINDS.get(kind, _PLAIN)[1]
            moved: float = own
            arriving = arriving_bytes(operation)
            if 2 * arriving <= self.rates.cache.num_bytes:
                moved -= self.saved_share * min(arriving, moved)
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
                work.products_s += self._product(
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


KERNEL_RECOMPUTATION = 0.5
"""Of the forward pass, what attention's kernels compute again in backward: the scores."""


def _factor(operation: Operation) -> float:
    """Backward over forward of an attention kernel."""
    needed = [each.requires_grad for each in operation.inputs]
    if len(needed) < 3:
        needed.append(needed[-1])  # keys and values in one
        return 2.0 * all(needed) + KERNEL_RECOMPUTATION
    return float(attention_factor(operation, needed)) + KERNEL_RECOMPUTATION


def _scratch(operation: Operation, scratch: Sequence[int]) -> int:
    """A pass's temporaries, but for what its collectives write, which is in their time, and narrow copies, which are told apart [bytes]."""
    if not scratch:
        return 0
    is_product = operation.kind is OperationKind.LINEAR
    if is_product and (operation.sends is not NO_SENDS or operation.outputs[0].dtype is DType.FP8):
        return 0
    return scratch_bytes(scratch)
