"""What a name in a model's code is bound to: a tensor with its shape and strides, on the tape's record of it."""

from math import prod

from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.layouts import Node, Rule, Settled, Settles, in_rows, unchanged
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import (
    Shape,
    broadcast,
    dense_strides,
    is_contiguous,
    row_strides,
    view_strides,
)
from memplan.graph.operations.elementwise import add_in_place

LEAST_SPLIT = 4
"""Dimensions from which on a view of another shape is a node of autograd's that is written down: heads are
split off or merged there. Rows of a matrix that are seen as sequences change nothing of what is allocated."""
Number = float
"""A number in a formula: which one it is changes nothing here."""


class Handle:
    """A tensor as a name holds it; when the last handle of a storage goes, the tape notes where."""

    __slots__ = ("flat", "node", "record", "run", "shape", "strides")

    is_complex = False
    """Its elements are complex numbers, two of the record's each."""

    def __init__(
        self,
        run: Run,
        record: Tensor,
        shape: Shape,
        strides: Shape | None = None,
        *,
        flat: bool = False,
    ) -> None:
        self.run = run
        self.record = record
        self.shape = shape
        self.strides = row_strides(shape) if strides is None else strides
        self.flat = flat
        """A linear layer made it, which takes its gradient in rows."""
        self.node: Node | None = None
        """Its place in the graph of views; None: it is behind none."""
        names, storage = run.names, record.storage
        names[storage] = names.get(storage, 0) + 1

    def __del__(self) -> None:
        run, storage = self.run, self.record.storage
        left = run.names[storage] - 1
        if left:
            run.names[storage] = left
        else:
            run.lose(self.record)

    @property
    def dtype(self) -> DType:
        """The format of its elements."""
        return self.record.dtype

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient reaches it."""
        return self.record.requires_grad

    @property
    def by_head(self) -> bool:
        """Whether heads lie one after another in memory, and not tokens."""
        shape, strides = self.shape, self.strides
        return len(shape) == 4 and shape[1] > 1 and strides[1] > strides[2]

    def laid(self) -> Tensor:
        """The record, told how it lies, for kernels that go by it."""
        self.record.by_head = self.by_head
        self.record.is_flat = len(self.shape) == 2
        if self.run.options.python_linear:
            self.record.is_scattered = not self.is_rows
        return self.record

    @property
    def is_rows(self) -> bool:
        """Whether it is seen as rows without a copy."""
        shape = self.shape
        return view_strides(shape, self.strides, (prod(shape[:-1]), shape[-1])) is not None

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in rows."""
        return is_contiguous(self.shape, self.strides)

    def like(self, record: Tensor, other: "Handle | None" = None) -> "Handle":
        """What an operation element by element gave: it lies as the operand that has its shape."""
        source, shape = self, self.shape
        if other is not None and other.shape != shape:
            shape = broadcast(shape, other.shape)
            source = self if self.shape == shape or other.shape != shape else other
        strides = dense_strides(shape, source.strides)
        made = Handle(self.run, record, shape, strides, flat=self.flat)
        if self.node is not None:
            self.leads_to(made)
        if other is not None:
            if other.node is not None:
                other.leads_to(made)
            elif other.flat:
                made.flat = True
        return made

    def leads_to(
        self, made: "Handle", rule: Rule | None = None, settles: Settles = None
    ) -> "Handle":
        """Note how a gradient of ``made`` lies when it arrives here: as it lay there, unless a rule says so."""
        if rule is None:
            made.flat |= self.flat
        if self.node is None and settles is None:
            return made
        if rule is None:
            # What was broadcast is summed up.
            rule = unchanged if self.shape == made.shape else in_rows(self.shape)
        if self.node is None:
            self.node = Node(self.shape, self.strides, flat=self.flat)
        if made.node is None:
            made.node = Node(made.shape, made.strides, flat=made.flat)
        self.run.layouts.add(self.node, made.node, rule, settles)
        return made

    # --- arithmetic ---------------------------------------------------------------------------------

    def __add__(self, other: "Handle | Number") -> "Handle":
        if isinstance(other, Handle):
            made = self.run.add(self.record, other.record)
            if len(self.shape) != len(other.shape) and self.record.numel == other.record.numel:
                self._sum_over_one(other)
            return self.like(made, other)
        return self.like(self.run.shift(self.record))

    def _sum_over_one(self, other: "Handle") -> None:
        """What has fewer dimensions has its gradient summed up even over a single row (``at::sum_to``)."""
        operation = self.run.segment.operations[-1]
        broadcast_one = int(len(other.shape) < len(self.shape))
        gradients = list(operation.gradients)
        if operation.inputs[broadcast_one].requires_grad:
            gradients[broadcast_one] = Gradient.SUMMED
        operation.gradients = tuple(gradients)

    def __iadd__(self, other: "Handle | Number") -> "Handle":  # noqa: PYI034  (a view of the same storage)
        assert isinstance(other, Handle)
        return self.like(add_in_place(self.run, self.record, other.record), other)

    def __sub__(self, other: "Handle") -> "Handle":
        """The second one's gradient is what arrives, negated; then summed up where it was broadcast."""
        run, shape = self.run, broadcast(self.shape, other.shape)
        made = run.tensor(prod(shape), self.dtype)
        negated = made.storage.num_bytes if other.shape != shape else Gradient.FRESH
        run.record(
            OperationKind.SUB, (self.record, other.record), (made,),
            gradients=(Gradient.ALIAS if self.shape == shape else Gradient.SUMMED, negated),
        )  # fmt: skip
        return self.like(made, other)

    def __mul__(self, other: "Handle | Number") -> "Handle":
        if isinstance(other, Handle):
            numel = prod(broadcast(self.shape, other.shape))
            return self.like(self.run.mul(self.record, other.record, numel=numel), other)
        return self.like(self.run.scale(self.record))

    def __radd__(self, other: Number) -> "Handle":
        return self + other

    def __rmul__(self, other: Number) -> "Handle":
        return self * other

    def __truediv__(self, other: Number) -> "Handle":
        return self * other

    def __neg__(self) -> "Handle":
        return self.like(self.run.scale(self.record, OperationKind.NEG))

    def __and__(self, other: "Handle") -> "Handle":
        return self.apart(OperationKind.BITWISE_AND, other)

    def apart(
        self,
        kind: OperationKind,
        *others: "Handle",
        dtype: DType | None = None,
        shape: Shape = (),
    ) -> "Handle":
        """What an operation gives that no gradient passes; ``shape`` is what it is spread to."""
        shape = broadcast(self.shape, shape)
        for each in others:
            shape = broadcast(shape, each.shape)
        made = empty(self.run, shape, dtype or self.dtype)
        self.run.record(kind, (self.record, *(each.record for each in others)), (made.record,))
        return made

    def to(self, dtype: DType) -> "Handle":
        """A copy in another format; itself where it has that."""
        return self if self.dtype is dtype else self.like(self.run.cast(self.record, dtype))

    def clone(self) -> "Handle":
        """A copy."""
        return self.like(self.run.scale(self.record, OperationKind.CLONE))

    def float(self) -> "Handle":
        """A copy in fp32."""
        return self.to(DType.FP32)

    def pow(self, exponent: Number) -> "Handle":  # noqa: ARG002  (every power keeps and costs the same)
        """A power of each element."""
        return self.like(self.run.square(self.record))

    def rsqrt(self) -> "Handle":
        """One over the root."""
        return self.unary(OperationKind.RSQRT)

    def tanh(self) -> "Handle":
        """The hyperbolic tangent."""
        return self.unary(OperationKind.TANH)

    def unary(self, kind: OperationKind) -> "Handle":
        """A function of each element, by its row of the table of operators."""
        return self.like(self.run.elementwise(kind, self.record))

    def mean(self) -> "Handle":
        """The mean over the last dimension, which stays as one of size 1."""
        record = self.run.mean(self.record, self.shape[-1])
        return Handle(self.run, record, (*self.shape[:-1], 1))

    # --- views, by their strides ------------------------------------------------------------------------

    def narrow(self, size: int, dim: int = -1) -> "Handle":
        """``x[..., a:b]``: its gradient is a tensor of zeros in rows, whatever lies beneath."""
        if size == self.shape[dim]:
            return self.aliased()
        shape = list(self.shape)
        shape[dim] = size
        record = self.run.slice(self.record, prod(shape))
        return self.leads_to(
            Handle(self.run, record, tuple(shape), self.strides), in_rows(self.shape)
        )

    def aliased(self) -> "Handle":
        """The whole as a view, whose gradients are summed up before they go on."""
        whole = Handle(self.run, self.run.alias(self.record), self.shape, self.strides)
        return self.leads_to(whole)

    def split(self, *sizes: int, dim: int = -1) -> "list[Handle]":
        """Parts along a dimension; their gradients are joined into one tensor of rows."""
        shapes = []
        for size in sizes:
            shape = list(self.shape)
            shape[dim] = size
            shapes.append(tuple(shape))
        records = self.run.split(self.record, *(prod(shape) for shape in shapes))
        rule = in_rows(self.shape)
        return [
            self.leads_to(Handle(self.run, record, shape, self.strides), rule)
            for record, shape in zip(records, shapes, strict=True)
        ]

    def select(self, dim: int) -> "Handle":
        """``x[..., i, :]``: one place of a dimension, which goes; its gradient as that of ``narrow``."""
        dim %= len(self.shape)
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], *self.strides[dim + 1 :])
        record = self.run.slice(self.record, prod(shape))
        return self.leads_to(Handle(self.run, record, shape, strides), in_rows(self.shape))

    def unbind(self, dim: int) -> "list[Handle]":
        """Parts along a dimension, which they no longer have."""
        dim %= len(self.shape)
        shape = *self.shape[:dim], *self.shape[dim + 1 :]
        strides = *self.strides[:dim], *self.strides[dim + 1 :]
        records = self.run.split(self.record, *(prod(shape),) * self.shape[dim])
        rule = in_rows(self.shape)
        return [self.leads_to(Handle(self.run, each, shape, strides), rule) for each in records]

    def unsqueeze(self, dim: int) -> "Handle":
        """A dimension of one more: no operation.

        A negative ``dim`` counts from behind the last one, as torch's does.
        """
        dim %= len(self.shape) + 1
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 0)
        made = Handle(self.run, self.record, tuple(shape), tuple(strides))
        return self.leads_to(made, lambda lies: (*lies[:dim], *lies[dim + 1 :]))

    def permute(self, *dims: int) -> "Handle":
        """Dimensions change places: no operation."""
        dims = tuple(each % len(dims) for each in dims)
        shape = tuple(self.shape[each] for each in dims)
        strides = tuple(self.strides[each] for each in dims)
        back = tuple(dims.index(each) for each in range(len(dims)))
        if self.flat and len(shape) == LEAST_SPLIT - 1 and self._is_of(OperationKind.LINEAR):
            return self._turned(shape, strides, lambda lies: tuple(lies[each] for each in back))
        made = Handle(self.run, self.record, shape, strides)
        if self.node is None:
            return made
        return self.leads_to(made, lambda lies: tuple(lies[each] for each in back))

    def _turned(self, shape: Shape, strides: Shape, rule: Rule) -> "Handle":
        """What a linear layer made, turned before any view: its rows' gradient is copied if it comes so."""
        run, record = self.run, self.run.view(self.record, self.numel)
        run.record(OperationKind.VIEW, (self.record,), (record,), gradients=(Gradient.SEEN,))
        settles = Settled(run.segment.operations[-1], Gradient.SEEN)
        return self.leads_to(Handle(run, record, shape, strides), rule, settles)

    def transpose(self, one: int, other: int) -> "Handle":
        """Two dimensions change places."""
        dims = list(range(len(self.shape)))
        dims[one], dims[other] = dims[other], dims[one]
        return self.permute(*dims)

    def view(self, *wanted: int) -> "Handle":
        """Another shape of the same storage, or of a copy where there is no such view.

        In backward a copy, if what arrives does not lie so. Raises ``ConfigError`` where the model's sizes let no such view be.
        """
        shape = self._whole(wanted)
        strides = view_strides(self.shape, self.strides, shape)
        if strides is None:
            return self.contiguous().view(*shape)
        before = self.shape
        if max(len(shape), len(before)) < LEAST_SPLIT:
            if self.requires_grad and self._is_of(OperationKind.ADD):
                return self.seen_as(*shape)
            made = Handle(self.run, self.record, shape, strides)
            return self.leads_to(made, lambda lies: view_strides(shape, lies, before))
        return self.viewed(shape, strides)

    def viewed(self, shape: Shape, strides: Shape) -> "Handle":
        """A view that is a node of autograd's: in backward a copy, if what arrives does not lie so."""
        before = self.shape
        made = Handle(self.run, self.run.view(self.record, self.numel), shape, strides)
        self.run.record(
            OperationKind.VIEW, (self.record,), (made.record,), gradients=(Gradient.SEEN,)
        )
        return self.leads_to(
            made,
            lambda lies: view_strides(shape, lies, before),
            settles=Settled(self.run.segment.operations[-1], Gradient.SEEN),
        )

    reshape = view

    def reshaped(self, *wanted: int) -> "Handle":
        """``reshape`` whose gradient comes turned: a node of autograd's however few dimensions there are."""
        shape = self._whole(wanted)
        strides = view_strides(self.shape, self.strides, shape)
        if strides is None:
            return self.contiguous().reshaped(*shape)
        return self.viewed(shape, strides)

    def seen_as(self, *shape: int) -> "Handle":
        """A view that is a node of autograd's: where gradients are added up behind it, it is written down."""
        shape, before = self._whole(shape), self.shape
        made = Handle(self.run, self._seen(), shape, view_strides(before, self.strides, shape))
        return self.leads_to(made, lambda lies: view_strides(shape, lies, before))

    def turned(self, *dims: int) -> "Handle":
        """``permute``, written down so too."""
        made = self.permute(*dims)
        made = Handle(self.run, self._seen(), made.shape, made.strides)
        return self.leads_to(
            made, lambda lies: tuple(lies[dims.index(each)] for each in range(len(dims)))
        )

    def _seen(self) -> Tensor:
        run = self.run
        record = run.view(self.record, self.numel)
        run.record(OperationKind.VIEW, (self.record,), (record,), gradients=(Gradient.SEEN,))
        run.seen_as.append(run.segment.operations[-1])
        return record

    def _is_of(self, kind: OperationKind) -> bool:
        """Whether an operation of this kind made it, in the open segment."""
        for operation in reversed(self.run.segment.operations):
            if self.record in operation.outputs:
                return operation.kind is kind
        return False

    def _whole(self, wanted: Shape) -> Shape:
        shape = wanted
        if -1 in wanted:
            known = -prod(wanted)
            shape = tuple(self.numel // known if size < 0 else size for size in wanted)
        if prod(shape) != prod(self.shape):
            given, asked = (" x ".join(map(str, each)) for each in (self.shape, shape))
            msg = (
                f"{self.run.source}: sizes do not go together: in {self.run.segment.name} a tensor of {given} "
                f"cannot be seen as {asked}"
            )
            raise ConfigError(msg)
        return shape

    def contiguous(self) -> "Handle":
        """The same in rows: a copy where it does not lie so."""
        if is_contiguous(self.shape, self.strides):
            return self
        made = Handle(self.run, self.run.contiguous(self.record), self.shape)
        return self.leads_to(made)

    def repeat_heads(self, times: int) -> "Handle":
        """``repeat_kv``: keys or values for every query head; of a single head a view."""
        if times == 1:
            return self
        batch, heads, length, width = self.shape
        shape = batch, heads * times, length, width
        if heads == 1:
            strides = self.strides[0], 0, *self.strides[2:]
            record = self.run.view(self.record, self.numel * times)
            made, kind = Handle(self.run, record, shape, strides), OperationKind.EXPAND
        else:
            made, kind = empty(self.run, shape, self.dtype), OperationKind.REPEAT_KV
        # What is summed over the heads of a group is seen without the dimension that they were.
        self.run.record(kind, (self.record,), (made.record,), gradients=(Gradient.VIEW,))
        return self.leads_to(made, in_rows(self.shape))


class ComplexHandle(Handle):
    """A tensor of complex numbers, which is no floating one (``torch.is_floating_point``)."""

    __slots__ = ()

    is_complex = True


def empty(run: Run, shape: Shape, dtype: DType) -> Handle:
    """A tensor of its own, in rows."""
    return Handle(run, run.tensor(prod(shape), dtype), shape)


def seen_in(run: Run, x: Tensor, shape: Shape, strides: Shape | None = None) -> Handle:
    """A view of what has no gradient, or of its beginning."""
    return Handle(run, run.view(x, prod(shape)), shape, strides)


def made_by(run: Run, kind: OperationKind, shape: Shape, dtype: DType) -> Handle:
    """What an operation gives that reads nothing of the model's."""
    made = empty(run, shape, dtype)
    run.record(kind, (), (made.record,))
    return made
