"""The tape: a model's operations, in order, on tensors that have a size but no values.

A ``Tensor`` is a number of elements and a dtype on a ``Storage``; views share their storage, and a
storage counts once however many operations keep it, as autograd counts. An ``Operation`` says what
it allocates, which storages it keeps for the backward pass, and how the gradient of its output
becomes gradients of its inputs. Operations stand in ``Segment``s: the embedding, one segment for
each run of equal layers, the head with its loss. What is alive when is found by walking the
segments (``memplan.memory.walks.walk``), never assumed here.

Sizes are rounded up as torch's caching allocator rounds them (``memplan.graph.core.tensors``).
"""

from memplan.dtypes import DType, promote
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.operators import FUNCTIONS, Function, Kept
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.core.weights import Weights


class Tape(Weights):
    """A recording with the plainest operations; ``memplan.graph.operations`` has the others."""

    def view(self, x: Tensor, numel: int) -> Tensor:
        """Take a part of a tensor as a view: the storage is shared; see ``slice`` for autograd."""
        return Tensor(numel, x.dtype, x.storage, requires_grad=x.requires_grad)

    def alias(self, x: Tensor) -> Tensor:
        """A slice of the whole, which hands its gradient on as a node of its own."""
        out = self.view(x, x.numel)
        out.by_head = x.by_head
        self.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Copy into another dtype; the same tensor where it already has it."""
        if x.dtype is dtype:
            return x
        out = self.tensor(x.numel, dtype)
        out.by_head, out.by_channel = x.by_head, x.by_channel
        out.by_column = x.by_column
        out.is_flat = x.is_flat
        self.record(OperationKind.TO, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def cast_argument(self, x: Tensor, dtype: DType) -> Tensor:
        """Copy what the segment is handed into another dtype, before it begins."""
        if x.dtype is dtype:
            return x
        reads = list(self.segment.external_reads)
        out = self.cast(x, dtype)
        self.segment.external_reads = reads
        self.segment.handed_in |= {out.storage}
        return out

    def cast_weight(self, weight: Parameter) -> Tensor:
        """Autocast's copy of a weight, made once per context and kept in its cache."""
        dtype = self.autocast
        if dtype is None or weight.dtype is dtype:
            return weight
        cached = self._casts.get(weight)
        if cached is None:
            cached = self.tensor(weight.numel, dtype)
            cached.storage.weight_cast = weight.requires_grad or weight in self.trained_leaves
            cached.by_column = True
            self.record(OperationKind.TO, (weight,), (cached,), gradients=(Gradient.FRESH,))
            self._casts[weight] = cached
        return cached

    def elementwise(
        self,
        kind: OperationKind,
        x: Tensor,
        *,
        function: Function | None = None,
        dtype: DType | None = None,
    ) -> Tensor:
        """Apply a function of one tensor, by the kind's row of the table or another one."""
        row = function or FUNCTIONS[kind]
        out = self.tensor(x.numel, dtype or x.dtype)
        out.by_channel, out.by_column = x.by_channel, x.by_column
        kept = row.kept
        saves = (x,) if kept is Kept.ARGUMENT else (out,) if kept is Kept.RESULT else ()
        size = out.storage.num_bytes
        scratch: int | tuple[int, ...] = row.decomposed_copies * size if self.decomposed else 0
        if row.copies and not self.decomposed:
            scratch = (*(size,) * row.copies, RESULT)
        self.record(
            kind, (x,), (out,), saves=saves, gradients=(Gradient.FRESH,),
            backward_scratch_bytes=scratch,
        )  # fmt: skip
        return out

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum two tensors of one size; the gradient of both is the output's own.

        It lies as the first one that is not spread (ATen/TensorIterator.cpp, ``reorder_dimensions``).
        """
        dtype = left.dtype if left.dtype is right.dtype else DType.FP32
        out = self.tensor(max(left.numel, right.numel), dtype)
        out.by_channel = (left if left.numel == out.numel else right).by_channel
        self.record(
            OperationKind.ADD,
            (left, right),
            (out,),
            gradients=(_sum_gradient(left, out), _sum_gradient(right, out)),
        )
        return out

    def mul(self, left: Tensor, right: Tensor, *, numel: int = 0) -> Tensor:
        """Multiply two tensors, the smaller one broadcast, or both to ``numel`` elements; each is kept for
        the other's gradient."""
        dtype = promote(left.dtype, right.dtype)
        out = self.tensor(numel or max(left.numel, right.numel), dtype)
        saves = []
        if left.requires_grad:
            saves.append(right)
        if right.requires_grad:
            saves.append(left)
        self.record(
            OperationKind.MUL,
            (left, right),
            (out,),
            saves=saves,
            gradients=(_product_gradient(left, out), _product_gradient(right, out)),
        )
        return out

    def scale(self, x: Tensor, kind: OperationKind = OperationKind.MUL_SCALAR) -> Tensor:
        """Multiply by, divide by or add a number: nothing is kept."""
        out = self.tensor(x.numel, x.dtype)
        out.by_channel = x.by_channel and kind is not OperationKind.CLONE
        self.record(kind, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def shift(self, x: Tensor) -> Tensor:
        """Add a number: nothing is kept, and the gradient passes through."""
        out = self.tensor(x.numel, x.dtype)
        out.by_column = x.by_column
        self.record(OperationKind.ADD_SCALAR, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out

    def mean(self, x: Tensor, width: int) -> Tensor:
        """Average over the last dimension of ``width`` elements."""
        out = self.tensor(x.numel // width, x.dtype)
        self.record(OperationKind.MEAN, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def square(self, x: Tensor) -> Tensor:
        """``x.pow(2)``, or any other power: keeps x; its backward formula makes two copies."""
        out = self.tensor(x.numel, x.dtype)
        self.record(
            OperationKind.POW, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
            backward_scratch_bytes=(out.storage.num_bytes, out.storage.num_bytes, RESULT),
        )  # fmt: skip
        return out

    def concatenate(self, *parts: Tensor) -> Tensor:
        """Copy tensors into one; their gradients are views of its gradient, or casts of them."""
        dtypes = {part.dtype for part in parts}
        out = self.tensor(
            sum(part.numel for part in parts), dtypes.pop() if len(dtypes) == 1 else DType.FP32
        )
        gradients = [
            Gradient.ALIAS if part.dtype is out.dtype else Gradient.FRESH for part in parts
        ]
        self.record(OperationKind.CAT, parts, (out,), gradients=gradients)
        return out

    def slice(self, x: Tensor, numel: int) -> Tensor:
        """A view of a part: its gradient is a zero-filled tensor of the whole."""
        out = self.view(x, numel)
        self.record(OperationKind.SLICE, (x,), (out,), gradients=(Gradient.FRESH,))
        return out

    def split(self, x: Tensor, *numels: int) -> list[Tensor]:
        """Views of consecutive parts; in backward their gradients are joined into one tensor."""
        outs = [self.view(x, numel) for numel in numels]
        self.record(OperationKind.SPLIT, (x,), outs, gradients=(Gradient.FRESH,))
        return outs

    def contiguous(self, x: Tensor) -> Tensor:
        """Copy into row-major order; the gradient passes through as a view."""
        out = self.tensor(x.numel, x.dtype)
        self.record(OperationKind.CLONE, (x,), (out,), gradients=(Gradient.ALIAS,))
        return out


def _sum_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one summand: passed on, cast, or summed where it was broadcast."""
    if part.numel != out.numel:
        return Gradient.SUMMED
    return Gradient.ALIAS if part.dtype is out.dtype else Gradient.FRESH


def _product_gradient(part: Tensor, out: Tensor) -> int:
    """The gradient of one factor: a product, first of the output's size where it was broadcast.

    The product has the output's dtype; engine and formula cast it to the factor's own.
    """
    if part.numel != out.numel or part.dtype is not out.dtype:
        return out.storage.num_bytes
    return Gradient.FRESH
