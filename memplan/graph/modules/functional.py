"""Functions of ``torch`` and ``torch.nn.functional`` on handles, beside those that every decoder calls."""

from math import prod

from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.experts.in_turn import add_rows as rows_added
from memplan.graph.experts.routing import divided, sum_dtype, summed_rows, take, top_k
from memplan.graph.modules.handles import Handle, empty, made_by, seen_in
from memplan.graph.modules.layouts import Settled, always, in_rows, unchanged
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import (
    Shape,
    dense_strides,
    is_contiguous,
    may_overlap,
    row_strides,
)
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import clamped as clamped_by
from memplan.graph.operations.elementwise import softmax as softmax_of
from memplan.graph.operations.elementwise import written
from memplan.graph.operations.products import matmul_tensor, matmul_weight, trained_weight
from memplan.model.networks import Activation


def linear(x: Handle, module: Module, weight: Weight, bias: Weight | None = None) -> Handle:
    """``F.linear`` with weights that a module declares by itself."""
    matrix = module.parameter(weight)
    addend = None if bias is None else module.parameter(bias)
    made = matmul_weight(x.run, x.laid(), matrix, addend)
    return Handle(x.run, made, (*x.shape[:-1], weight.shape[0]), flat=True)


def in_rows_again(x: Handle) -> Handle:
    """The sequences that a linear layer made of rows: where their gradient lies otherwise it is copied here,
    and not at the views behind (torch 2.13, aten/src/ATen/native/Linear.cpp, ``_unsafe_view``).

    A linear layer that is a function in Python made no rows.
    """
    if x.run.options.python_linear:
        return x
    run, made = x.run, Handle(x.run, x.run.view(x.record, x.numel), x.shape)
    run.record(OperationKind.VIEW, (x.record,), (made.record,), gradients=(Gradient.SEEN,))
    return x.leads_to(made, unchanged, Settled(run.segment.operations[-1], Gradient.SEEN))


def read_in_rows(x: Handle) -> Handle:
    """What the next segment reads, whose gradient comes in rows from there, however this lies."""
    return read_as(x, row_strides(x.shape))


def read_as(x: Handle, strides: Shape) -> Handle:
    """The same of a gradient that comes otherwise."""
    return x.leads_to(Handle(x.run, x.record, x.shape, x.strides), always(strides))


def softmax(x: Handle, *, dtype: DType | None = None, in_own_dtype: bool = False) -> Handle:
    """``F.softmax`` over the last dimension; ``in_own_dtype``: the call names the dtype that ``x`` has."""
    turned = not is_contiguous(x.shape, x.strides)
    made = softmax_of(x.run, x.record, dtype=dtype, in_own_dtype=in_own_dtype, strided=turned)
    return x.leads_to(Handle(x.run, made, x.shape), in_rows(x.shape)) if turned else x.like(made)


def log_softmax(x: Handle, *, widened: bool = True) -> Handle:
    """``F.log_softmax`` over the last dimension, which autocast runs in fp32 unless it is a loss's own; keeps what it gives."""
    given = x if x.run.autocast is None or not widened else x.float()
    made = empty(x.run, x.shape, given.dtype)
    x.run.record(
        OperationKind.LOG_SOFTMAX, (given.record,), (made.record,), saves=(made.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return made


def topk(x: Handle, count: int) -> tuple[Handle, Handle]:
    """The largest of each row, and where they are."""
    shape = *x.shape[:-1], count
    values, indices = top_k(x.run, x.record, prod(shape), rows=prod(shape[:-1]))
    return Handle(x.run, values, shape), Handle(x.run, indices, shape)


def total(x: Handle) -> Handle:
    """``x.sum(dim=-1, keepdim=True)``."""
    return Handle(x.run, summed_rows(x.run, x.record, prod(x.shape[:-1])), (*x.shape[:-1], 1))


def row_sums(x: Handle) -> Handle:
    """``x.sum(dim=-1)`` that no gradient passes."""
    made = empty(x.run, x.shape[:-1], sum_dtype(x.run, x.dtype))
    x.run.record(OperationKind.SUM, (x.record,), (made.record,))
    return made


def best(x: Handle, count: int) -> tuple[Handle, Handle]:
    """``x.topk(count)`` that no gradient passes."""
    shape = *x.shape[:-1], min(count, x.shape[-1])
    values, indices = empty(x.run, shape, x.dtype), empty(x.run, shape, DType.INT64)
    x.run.record(
        OperationKind.TOPK, (x.record,), (values.record, indices.record),
        forward_scratch_bytes=x.run.selection_scratch(prod(shape[:-1]), x.record),
    )  # fmt: skip
    return values, indices


def fp32_linear(x: Handle, module: Module, weight: Weight, *, region: bool = True) -> Handle:
    """``F.linear(x.float(), weight.float())``; autocast casts both again, the second one first, but outside
    of its ``region``."""
    run = x.run
    rows, x = x.shape[0], x.float()
    factor = run.cast(trained_weight(run, module.parameter(weight)), DType.FP32)
    given = [x, Handle(run, factor, weight.shape)]  # the call's arguments, until it returns
    if run.autocast is not None and region:
        if isinstance(factor, Parameter):
            factor = run.cast_weight(factor)
        else:
            factor = run.cast(factor, run.autocast)
        x = x.to(run.autocast)
    made = empty(run, (rows, weight.shape[0]), x.dtype)
    run.record(
        OperationKind.LINEAR, (x.record, factor), (made.record,), saves=(factor, x.record),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * rows * prod(weight.shape),
    )  # fmt: skip
    del x
    given.reverse()
    while given:
        given.pop()
    return made


def divide(x: Handle, divisor: Handle) -> Handle:
    """``x / divisor``: both are kept."""
    return Handle(x.run, divided(x.run, x.record, divisor.record, in_place=False), x.shape)


def divide_in_place(x: Handle, divisor: Handle) -> Handle:
    """``x /= divisor``: autograd keeps a copy of what was there."""
    return Handle(x.run, divided(x.run, x.record, divisor.record, in_place=True), x.shape)


def index(x: Handle, indices: Handle, shape: Shape) -> Handle:
    """``x[indices]``, which has this shape."""
    return Handle(x.run, take(x.run, x.record, indices.record, prod(shape)), shape)


MOST_IN_BLOCK = 4096
"""Numbers that are sorted without radix passes (torch 2.13, aten/src/ATen/native/cuda/Sort.cpp, ``should_use_small_sort``)."""
LARGEST_INT64 = (1 << 63) - 1


def sort(x: Handle) -> tuple[Handle, Handle]:
    """Values of 64 bits in order, and where each was: both are sorted beside a copy of what is given.

    (asked of torch 2.13 for eight sizes from 1,024 to 262,144)
    """
    run = x.run
    values, order = (empty(run, x.shape, x.dtype) for _ in range(2))
    scratch: tuple[int, ...] = (RESULT, values.record.storage.num_bytes)
    if x.numel > MOST_IN_BLOCK:
        scratch += (run.sort_scratch_bytes(x.numel, largest_key=LARGEST_INT64),)
    run.record(
        OperationKind.SORT, (x.record,), (values.record, order.record),
        forward_scratch_bytes=() if run.decomposed else scratch,
    )  # fmt: skip
    return values, order


def zeros(like: Handle) -> Handle:
    """``torch.zeros_like``."""
    return made_by(like.run, OperationKind.ZEROS, like.shape, like.dtype)


def multiply_in_place(x: Handle, noise: Handle) -> Handle:
    """``x *= noise``, which is kept."""
    run = x.run
    made = run.view(x.record, x.numel)
    run.record(
        OperationKind.MUL_IN_PLACE, (x.record, noise.record), (made,), saves=(noise.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.leads_to(Handle(run, made, x.shape), in_rows(x.shape))


def jittered(x: Handle) -> Handle:
    """``x *= torch.empty_like(x).uniform_(...)``."""
    return multiply_in_place(x, made_by(x.run, OperationKind.UNIFORM_IN_PLACE, x.shape, x.dtype))


def detached(x: Handle) -> Handle:
    """The same, through which no gradient goes."""
    return Handle(x.run, Tensor(x.numel, x.dtype, x.record.storage), x.shape, x.strides)


def largest(x: Handle) -> tuple[Handle, Handle]:
    """``x.max(dim=-1, keepdim=True)`` without a gradient."""
    run, shape = x.run, (*x.shape[:-1], 1)
    values, places = empty(run, shape, x.dtype), empty(run, shape, DType.INT64)
    run.record(OperationKind.MAX, (x.record,), (values.record, places.record))
    return values, places


def masked_fill(x: Handle, mask: Handle) -> Handle:
    """``x.masked_fill(mask, number)``: keeps the mask."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    run.record(
        OperationKind.MASKED_FILL, (x.record, mask.record), (made.record,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def masked_fill_in_place(x: Handle, mask: Handle) -> Handle:
    """``x.masked_fill_(mask, number)``: keeps the mask."""
    run, made = x.run, x.run.view(x.record, x.numel)
    run.record(
        OperationKind.MASKED_FILL_IN_PLACE, (x.record, mask.record), (made,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.like(made)


def scatter(x: Handle, places: Handle) -> Handle:
    """``torch.scatter(x, -1, places, number)``: keeps the places."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    run.record(
        OperationKind.SCATTER, (x.record, places.record), (made.record,), saves=(places.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def scatter_into(x: Handle, places: Handle, shape: Shape) -> Handle:
    """``torch.full(shape, number).scatter_(-1, places, x)``: keeps the places."""
    run, made = x.run, empty(x.run, shape, x.dtype)
    run.record(
        OperationKind.SCATTER, (x.record, places.record), (made.record,), saves=(places.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def gather(x: Handle, places: Handle, *, dim: int = -1) -> Handle:
    """``x.gather(dim, places)``: keeps both (derivatives.yaml, ``gather_backward``)."""
    shape = list(x.shape)
    shape[dim] = places.shape[dim]
    run, made = x.run, empty(x.run, tuple(shape), x.dtype)
    run.record(
        OperationKind.GATHER, (x.record, places.record), (made.record,),
        saves=(x.record, places.record), gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=x.record.storage.num_bytes if run.decomposed else 0,
    )  # fmt: skip
    return made


def estimated(scores: Handle, multiplier: Handle, selected: Handle, gates: Handle) -> Handle:
    """``PhimoeMultiplier``: what it keeps gives the scores a gradient, and nothing else one."""
    run, made = scores.run, empty(scores.run, multiplier.shape, multiplier.dtype)
    size = made.record.storage.num_bytes
    run.record(
        OperationKind.MULTIPLIER, (scores.record, multiplier.record), (made.record,),
        saves=(multiplier.record, selected.record, gates.record),
        gradients=(Gradient.FRESH, Gradient.NONE), backward_scratch_bytes=(size, size, RESULT),
        in_python=True,
    )  # fmt: skip
    return made


def made_from(kind: OperationKind, shape: Shape, dtype: DType, *reads: Handle) -> Handle:
    """What an operation gives of a shape of its own, through which no gradient goes."""
    made = empty(reads[0].run, shape, dtype)
    made.run.record(kind, [each.record for each in reads], (made.record,))
    return made


def clamped(x: Handle, *, bounds: int) -> Handle:
    """``x.clamp(...)`` by one number or two: keeps what it was given."""
    return x.like(clamped_by(x.run, x.record, bounds=bounds))


def less_largest(x: Handle) -> Handle:
    """``x - x.max(dim=-1, keepdim=True).values``: keeps where the largest are."""
    run, shape = x.run, (*x.shape[:-1], 1)
    values, places = empty(run, shape, x.dtype), empty(run, shape, DType.INT64)
    run.record(
        OperationKind.MAX, (x.record,), (values.record, places.record), saves=(places.record,),
        gradients=(Gradient.FRESH,),
        backward_scratch_bytes=x.record.storage.num_bytes if run.decomposed else 0,
    )  # fmt: skip
    made = run.tensor(x.numel, x.dtype)
    run.record(
        OperationKind.SUB, (x.record, values.record), (made,),
        gradients=(Gradient.ALIAS, made.storage.num_bytes),
    )  # fmt: skip
    return x.like(made)


def expanded(x: Handle, shape: Shape) -> Handle:
    """``x.reshape(...).expand(shape)``: a view, whose gradient is summed up."""
    run = x.run
    made = Handle(run, run.view(x.record, prod(shape)), shape)
    run.record(OperationKind.EXPAND, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return made


def part_of(stack: Handle, count: int) -> Handle:
    """``stack[number]``, one of so many: its gradient is a tensor of zeros as large as all.

    Where the parts have no dimension of their own it goes through a view, and sums take no place in it.
    """
    *rows, width = stack.shape
    shape = prod(rows) // count, width
    made = stack.run.view(stack.record, prod(shape))
    gradient = Gradient.VIEW if len(rows) == 1 else Gradient.FRESH
    stack.run.record(OperationKind.SLICE, (stack.record,), (made,), gradients=(gradient,))
    return Handle(stack.run, made, shape)


def product(x: Handle, factor: Handle, bias: Handle | None = None) -> Handle:
    """``F.linear`` with what is no parameter of its own."""
    inputs, outputs = x.shape[-1], factor.numel // x.shape[-1]
    addend = None if bias is None else bias.record
    made = matmul_tensor(x.run, x.record, factor.record, inputs, addend)
    return Handle(x.run, made, (*x.shape[:-1], outputs))


def repeated(x: Handle, times: int, *, dim: int = 0) -> Handle:
    """``x.repeat(...)`` along one dimension."""
    shape = list(x.shape)
    shape[dim] *= times
    made = empty(x.run, tuple(shape), x.dtype)
    x.run.record(OperationKind.REPEAT, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def repeat_interleave(x: Handle, times: int, *, dim: int) -> Handle:
    """``x.repeat_interleave(times, dim)``: each of them so often, one behind the other."""
    shape = list(x.shape)
    shape[dim] *= times
    made = empty(x.run, tuple(shape), x.dtype)
    x.run.record(
        OperationKind.REPEAT_INTERLEAVE, (x.record,), (made.record,), gradients=(Gradient.FRESH,)
    )
    return x.leads_to(made, in_rows(x.shape))


def root_of_squares(x: Handle, *, linalg: bool = False) -> Handle:
    """``torch.norm(x, p=..., dim=-1, keepdim=True)``: keeps what it was given and its result.

    Autocast has it give fp32, and has no rule for ``torch.linalg.norm``.
    """
    dtype = x.dtype if linalg or x.run.autocast is None else DType.FP32
    made = empty(x.run, (*x.shape[:-1], 1), dtype)
    x.run.record(
        OperationKind.VECTOR_NORM, (x.record,), (made.record,), saves=(x.record, made.record),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return made


def add_rows(total: Handle, rows: Handle, places: Handle) -> Handle:
    """``total.index_add_(0, places, rows)``."""
    made = rows_added(total.run, total.record, rows.record, places.record)
    return Handle(total.run, made, total.shape)


def rows_added_to_zeros(rows: Handle, places: Handle, shape: Shape) -> Handle:
    """``torch.zeros(shape).index_add(0, places, rows)``: a new tensor."""
    run, made = rows.run, empty(rows.run, shape, rows.dtype)
    blank = made_by(run, OperationKind.ZEROS, shape, rows.dtype)
    run.record(
        OperationKind.INDEX_ADD_IN_PLACE, (blank.record, rows.record, places.record), (made.record,),
        saves=(places.record, rows.record), gradients=(Gradient.NONE, Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def fill(base: Handle, part: Handle) -> Handle:
    """``base[...].copy_(part)`` (``CopySlices``): backward copies the whole gradient, and the slice.

    The copy of the whole, with the slice zeroed, is the gradient of what was there before.
    """
    run, made = base.run, base.run.view(base.record, base.numel)
    whole, zeros = base.record.storage.num_bytes, allocated_bytes(part.numel, base.dtype)
    scratch: int | tuple[int, ...] = zeros
    if part.dtype is not base.dtype and not run.decomposed:
        scratch = (RESULT, zeros, zeros, RESULT)  # and the slice's is cast
    if not base.requires_grad:
        scratch = whole if run.decomposed else (whole, RESULT)
    run.record(
        OperationKind.COPY_IN_PLACE, (base.record, part.record), (made,),
        gradients=(Gradient.FRESH, Gradient.FRESH), backward_scratch_bytes=scratch,
    )  # fmt: skip
    return part.leads_to(base.leads_to(Handle(run, made, base.shape)), in_rows(part.shape))


def upcast_product(q: Handle, k: Handle) -> Handle:
    """``torch.baddbmm`` of fp32 copies outside autocast: what it is given to write in it leaves blank."""
    run, first, second = q.run, q.float(), k.float()
    weights = empty(run, (*q.shape[:2], k.shape[-1]), DType.FP32)
    run.record(
        OperationKind.BADDBMM, (first.record, second.record), (weights.record,),
        saves=(first.record, second.record), gradients=(Gradient.FRESH,) * 2,
        flops=2 * weights.numel * q.shape[-1],
    )  # fmt: skip
    for each in (first, second):
        each.leads_to(weights, in_rows(each.shape))
    return weights


def batched_product(one: Handle, two: Handle) -> Handle:
    """``torch.bmm``, under autocast of its copies."""
    run = one.run
    if run.autocast is not None:
        two = two.to(run.autocast)
        one = one.to(run.autocast)
    made = empty(run, (*one.shape[:2], two.shape[-1]), one.dtype)
    saves = [two.record] * one.requires_grad + [one.record] * two.requires_grad
    run.record(
        OperationKind.MATMUL, (one.record, two.record), (made.record,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * made.numel * one.shape[-1],
    )  # fmt: skip
    for each in (one, two):
        each.leads_to(made, in_rows(each.shape))
    return made


def index_select(x: Handle, count: int) -> Handle:
    """The first so many of each row, by a list of them that is made for it and kept."""
    run, made = x.run, empty(x.run, (*x.shape[:-1], count), x.dtype)
    places = made_by(run, OperationKind.ARANGE, (count,), DType.INT64)
    run.record(
        OperationKind.INDEX_SELECT, (x.record, places.record), (made.record,),
        saves=(places.record,), gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def spread(x: Handle, shape: Shape) -> Handle:
    """``x.expand(shape)`` of what has no gradient."""
    strides = tuple(
        0 if size == 1 < wanted else stride
        for size, wanted, stride in zip(x.shape, shape, x.strides, strict=True)
    )
    return seen_in(x.run, x.record, shape, strides)


def not_below(x: Handle) -> Handle:
    """``torch.max(x, lowest)``: keeps the scores, and the number.

    Its gradient is halved where both are equal and zero where the scores are lower: the half and a
    comparison before the result, a second comparison behind it (torch's derivatives.yaml, ``maximum``).
    """
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    equal = allocated_bytes(made.numel, DType.BOOL)
    lowest = made_by(run, OperationKind.ZEROS, (1,), x.dtype).record
    run.record(
        OperationKind.MAXIMUM, (x.record,), (made.record,), saves=(x.record, lowest),
        gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(made.record.storage.num_bytes, equal, RESULT, equal),
    )  # fmt: skip
    return made


def added_product(alibi: Handle, one: Handle, two: Handle) -> Handle:
    """``alibi.baddbmm(batch1, batch2, alpha=...)``.

    Either factor's gradient is a product, then that times ``alpha`` (torch's derivatives.yaml,
    ``baddbmm_maybe_multiply``).
    """
    run = one.run
    if run.autocast is not None:
        two = two.to(run.autocast)
        one = one.to(run.autocast)
    size, made = (
        one.record.storage.num_bytes,
        empty(run, (*one.shape[:2], two.shape[-1]), one.dtype),
    )
    saves = [two.record] * one.requires_grad + [one.record] * two.requires_grad
    scratch = () if run.decomposed else (size, RESULT, ~0, size, RESULT)
    run.record(
        OperationKind.MATMUL, (one.record, two.record, alibi.record), (made.record,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE),
        flops=2 * made.numel * one.shape[-1], backward_scratch_bytes=scratch,
    )  # fmt: skip
    for each in (one, two):
        each.leads_to(made, in_rows(each.shape))
    return made


def add_in_place(left: Handle, right: Handle) -> Handle:
    """``left += right``."""
    run, made = left.run, left.run.view(left.record, left.numel)
    run.record(
        OperationKind.ADD_IN_PLACE, (left.record, right.record), (made,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS),
    )  # fmt: skip
    return left.like(made, right)


def scaled_in_place(x: Handle, *, of_view: bool = False) -> Handle:
    """``x *= number``, or over one: its gradient is another number of times what arrives.

    Where ``x`` is a view, that of all it shows is copied first, and the view's part of it once more
    (torch 2.13, csrc/autograd/functions/tensor.cpp, ``CopySlices``); what reads it then goes through a view
    of another kind, whose gradient is a copy (``as_strided_backward``).
    """
    made, size = x.run.view(x.record, x.numel), allocated_bytes(x.numel, x.dtype)
    x.run.record(
        OperationKind.MUL_IN_PLACE, (x.record,), (made,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(RESULT, size, size) if of_view and not x.run.decomposed else (),
    )  # fmt: skip
    return x.like(x.run.slice(made, made.numel) if of_view else made)


def spread_copy(x: Handle, shape: Shape) -> Handle:
    """A copy in which each element stands several times."""
    made = empty(x.run, shape, x.dtype)
    x.run.record(OperationKind.BROADCAST, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def picked(x: Handle, mask: Handle, rows: int) -> Handle:
    """``x[mask]``: so many sequences, whose places are kept; the gradient is put into zeros."""
    run, shape = x.run, (rows, *x.shape[1:])
    places = made_from(OperationKind.NONZERO, (rows,), DType.INT64, mask)
    made = empty(run, shape, x.dtype)
    run.record(
        OperationKind.INDEX, (x.record, places.record), (made.record,), saves=(places.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=x.record.storage.num_bytes if run.decomposed else 0,
    )  # fmt: skip
    return made


def copy_at(x: Handle, part: Handle) -> Handle:
    """``x[mask] = part``: in place; backward writes zeros over a copy of the gradient, which is ``x``'s."""
    run, made = x.run, x.run.view(x.record, x.numel)
    of_x = Gradient.FRESH if x.requires_grad else Gradient.NONE
    blank = allocated_bytes(part.numel, x.dtype) if x.requires_grad else 0
    run.record(
        OperationKind.COPY_SLICE, (x.record, part.record), (made,), gradients=(of_x, Gradient.FRESH),
        backward_scratch_bytes=(blank, RESULT, ~0, RESULT) if blank else 0,
    )  # fmt: skip
    return x.leads_to(Handle(run, made, x.shape), in_rows(x.shape))


def masked_scatter(x: Handle, mask: Handle, source: Handle) -> Handle:
    """``x.masked_scatter(mask, source)``: keeps the mask.

    Behind the copy of ``x`` places are counted, and the mask is spread and copied; so it is for the source's gradient,
    of whose elements the place in each dimension is found (torch 2.13, aten/src/ATen/native/cuda/IndexKernel.cpp,
    ``masked_scatter__cuda``, ``masked_select_cuda``; Nonzero.cu).
    """
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    spread_mask, places = (allocated_bytes(x.numel, each) for each in (DType.BOOL, DType.INT64))
    found = allocated_bytes(source.numel * len(x.shape), DType.INT64)
    of_x = (RESULT,) * x.requires_grad
    run.record(
        OperationKind.SCATTER, (x.record, source.record), (made.record,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        forward_scratch_bytes=() if run.decomposed else (RESULT, places, spread_mask),
        backward_scratch_bytes=() if run.decomposed else (*of_x, spread_mask, found, ~len(of_x), RESULT),
    )  # fmt: skip
    return made


def relative_position_bucket(distance: Handle) -> Handle:
    """Distances both ways in buckets, near ones of their own (models/mpnet, ``relative_position_bucket``)."""
    kinds = OperationKind
    n = distance.apart(kinds.NEG)
    ret = n.apart(kinds.LT, dtype=DType.BOOL).apart(kinds.TO, dtype=DType.INT64)
    ret = ret.apart(kinds.MUL_SCALAR)
    ret = ret.apart(kinds.ADD)
    n = n.apart(kinds.ABS)
    is_small = n.apart(kinds.LT, dtype=DType.BOOL)
    large = n.apart(kinds.TO, dtype=DType.FP32).apart(kinds.DIV)
    large = large.apart(kinds.LOG)
    large = large.apart(kinds.DIV)
    large = large.apart(kinds.MUL_SCALAR)
    val_if_large = large.apart(kinds.TO, dtype=DType.INT64)
    del large
    val_if_large = val_if_large.apart(kinds.ADD)
    val_if_large = val_if_large.apart(kinds.MINIMUM, val_if_large.apart(kinds.ONES))
    ret += n.apart(kinds.WHERE, is_small, val_if_large)
    return ret


def unfold(x: Handle, kernel: int) -> Handle:
    """``F.unfold`` along the tokens: each one's neighbours side by side."""
    batch, channels, length, _ = x.shape
    made = empty(x.run, (batch, channels * kernel, length), x.dtype)
    x.run.record(OperationKind.IM2COL, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def unfold_picture(x: Handle, side: int) -> Handle:
    """``F.unfold(x, side, stride=side)``: windows' numbers side by side; what does not lie in rows is copied for it.

    (torch 2.13, aten/src/ATen/native/cuda/Im2Col.cu)
    """
    batch, channels, height, width = x.shape
    windows = height // side * (width // side)
    made = empty(x.run, (batch, channels * side**2, windows), x.dtype)
    copies = () if is_contiguous(x.shape, x.strides) else (x.record.storage.num_bytes, RESULT)
    x.run.record(
        OperationKind.IM2COL, (x.record,), (made.record,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=copies,
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def grouped_product(x: Handle, module: Module, weight: Weight) -> Handle:
    """``x @ weight``, of as many matrices as the weight has."""
    groups, inner, width = weight.shape
    rows = x.shape[1]
    factor = x.run.cast_weight(module.parameter(weight))
    made = batched_matmul(x.run, x.record, factor, groups * rows * width, inner)
    return x.leads_to(Handle(x.run, made, (groups, rows, width)), in_rows(x.shape))


def fourier_transform(x: Handle) -> Handle:
    """``torch.fft.fftn(x, dim=(1, 2)).real``: a copy in complex numbers, two fp32 each, its transform, and a view of it.

    Raises ``UnsupportedOperationError`` for 16-bit hidden states, which cuFFT does not know.
    """
    if x.dtype is not DType.FP32:
        msg = (
            "torch.fft knows no 16-bit numbers on GPUs: FNet trains in fp32 without autocast; choose "
            "`precision=fp32`"
        )
        raise UnsupportedOperationError(msg)
    run, shape = x.run, (*x.shape, 2)
    # The gradient's real part is a view again, so that nothing is made for it.
    given, made = empty(run, shape, DType.FP32), empty(run, shape, DType.FP32)
    run.record(OperationKind.TO, (x.record,), (given.record,), gradients=(Gradient.ALIAS,))
    run.record(OperationKind.FFT, (given.record,), (made.record,), gradients=(Gradient.FRESH,))
    del given
    real = run.view(made.record, x.numel)
    run.record(OperationKind.VIEW, (made.record,), (real,), gradients=(Gradient.FRESH,))
    return Handle(run, real, x.shape)


def activated(x: Handle, kind: Activation) -> Handle:
    """A nonlinearity that is called as a function."""
    return x.like(activation(x.run, x.record, kind))


def binary_cross_entropy(logits: Handle, labels: Handle | None = None) -> Tensor:
    """``BCEWithLogitsLoss`` of labels that are cast to fp32 unless they come so, as autocast casts the logits."""
    run = logits.run
    given = logits if run.autocast is None else logits.float()
    if labels is None:
        labels = empty(run, logits.shape, DType.FP32)
        run.record(OperationKind.TO, (), (labels.record,))
    loss = run.tensor(1, given.dtype)
    run.record(
        OperationKind.BINARY_CROSS_ENTROPY_WITH_LOGITS, (given.record, labels.record), (loss,),
        saves=(given.record, labels.record), gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return loss


def masked_fill_rows(x: Handle, mask: Handle) -> Handle:
    """``x.masked_fill(mask.unsqueeze(-1), 0.0)``: keeps the mask."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    run.record(
        OperationKind.MASKED_FILL, (x.record, mask.record), (made.record,), saves=(mask.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return made


def mean_of_tokens(x: Handle) -> Handle:
    """``x.mean(dim=1)``."""
    batch, length, width = x.shape
    return Handle(x.run, x.run.mean(x.record, length), (batch, width))


def summed(x: Handle) -> Handle:
    """``torch.sum(x, dim=-1, dtype=torch.float32)`` of a vector."""
    made = empty(x.run, (1,), DType.FP32)
    x.run.record(OperationKind.SUM, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return made


def summed_over(x: Handle, dim: int) -> Handle:
    """``x.sum(dim=...)``: its gradient is spread."""
    shape = *x.shape[:dim], *x.shape[dim + 1 :]
    made = empty(x.run, shape, sum_dtype(x.run, x.dtype))
    gradient = Gradient.ALIAS if made.dtype is x.dtype else Gradient.FRESH
    x.run.record(OperationKind.SUM, (x.record,), (made.record,), gradients=(gradient,))
    return made


def sum_of_stretches(x: Handle, count: int) -> Handle:
    """``x.reshape(count, -1, width).sum(dim=0)``: its gradient is spread, and copied out for every stretch."""
    run, (rows, width) = x.run, x.shape
    seen = Handle(run, run.view(x.record, x.numel), (count, rows // count, width))
    run.record(OperationKind.VIEW, (x.record,), (seen.record,), gradients=(Gradient.FRESH,))
    made = empty(run, (rows // count, width), x.dtype)
    run.record(OperationKind.SUM, (seen.record,), (made.record,), gradients=(Gradient.ALIAS,))
    return made


def as_real(x: Handle) -> Handle:
    """``torch.view_as_real(x).flatten(...)``: its gradient is seen as complex numbers."""
    run, made = x.run, x.run.view(x.record, x.numel)
    run.record(OperationKind.VIEW_AS_REAL, (x.record,), (made,), gradients=(Gradient.ALIAS,))
    return x.like(made)


def added_crosswise(one: Handle, other: Handle) -> Handle:
    """``one.unsqueeze(-1) + other.unsqueeze(-2)``, of all pairs in a row."""
    rows, width = one.shape
    made = empty(one.run, (rows, width * other.shape[-1]), one.dtype)
    one.run.record(
        OperationKind.ADD, (one.record, other.record), (made.record,),
        gradients=(Gradient.SUMMED, Gradient.SUMMED),
    )  # fmt: skip
    return made


def added_both_ways(one: Handle, other: Handle) -> Handle:
    """``one[..., None] + other[..., None, :]``, which lies as the first one does."""
    shape = *one.shape, other.shape[-1]
    strides = *(step * shape[-1] for step in dense_strides(one.shape, one.strides)), 1
    made = Handle(one.run, one.run.tensor(prod(shape), one.dtype), shape, strides)
    one.run.record(
        OperationKind.ADD, (one.record, other.record), (made.record,),
        gradients=(Gradient.SUMMED, Gradient.SUMMED),
    )  # fmt: skip
    for each in (one, other):
        each.leads_to(made, in_rows(each.shape))
    return made


def rows_of(x: Handle, shape: Shape) -> Handle:
    """``x[numbers]``, which has this shape; which rows, the CPU counts and keeps."""
    made = empty(x.run, shape, x.dtype)
    x.run.record(OperationKind.INDEX, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def log_sigmoid(x: Handle) -> Handle:
    """``F.logsigmoid``, which autocast runs in what it is given; keeps that."""
    made = empty(x.run, x.shape, x.dtype)
    x.run.record(
        OperationKind.LOG_SIGMOID, (x.record,), (made.record,), saves=(x.record,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return x.leads_to(made)


def relu_in_place(x: Handle) -> Handle:
    """``torch.relu_(x)``: keeps what it has written."""
    made = x.run.view(x.record, x.numel)
    x.run.record(
        OperationKind.RELU, (x.record,), (made,), saves=(made,), gradients=(Gradient.FRESH,)
    )
    return x.like(made)


def padded(x: Handle, shape: Shape) -> Handle:
    """``torch.nn.functional.pad``."""
    made = empty(x.run, shape, x.dtype)
    x.run.record(OperationKind.PAD, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


def as_strided(x: Handle, shape: Shape, strides: Shape, *, turned: bool = False) -> Handle:
    """A view that may overlap itself: its gradient is then added up by the numbers of its elements, and
    one that comes ``turned`` put into rows before; where it does not, it is copied into zeros.

    (torch 2.13, csrc/autograd/FunctionsManual.cpp, ``as_strided_backward``)
    """
    run, made = x.run, Handle(x.run, x.run.view(x.record, prod(shape)), shape, strides)
    rows = (allocated_bytes(made.numel, x.dtype),) * turned
    numbers = allocated_bytes(x.numel, DType.INT64), allocated_bytes(made.numel, DType.INT64)
    adds_up = (RESULT, numbers[0], *rows, numbers[1]) if may_overlap(shape, strides) else ()
    run.record(
        OperationKind.VIEW, (x.record,), (made.record,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=adds_up,
    )  # fmt: skip
    return x.leads_to(made, always(x.strides))


def write(x: Handle, part: Handle) -> Handle:
    """``x[...] = part``: in place."""
    made = Handle(x.run, written(x.run, x.record, part.record), x.shape, x.strides)
    return part.leads_to(x.leads_to(made, in_rows(x.shape)), in_rows(part.shape))


def filled_where_not(x: Handle, mask: Handle) -> Handle:
    """``torch.where(mask == 0, number, x)``: the condition is kept."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    condition = mask.apart(OperationKind.EQ, dtype=DType.BOOL)
    run.record(
        OperationKind.WHERE, (condition.record, x.record), (made.record,), saves=(condition.record,),
        gradients=(Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def filled_where(x: Handle, mask: Handle) -> Handle:
    """``torch.full_like(x, number).where(mask.bool(), x)``: the mask, of all elements, is kept."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    filled = made_by(run, OperationKind.ZEROS, x.shape, x.dtype)
    condition = mask.apart(OperationKind.TO, dtype=DType.BOOL, shape=x.shape)
    run.record(
        OperationKind.WHERE, (condition.record, filled.record, x.record), (made.record,),
        saves=(condition.record,), gradients=(Gradient.NONE, Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    return x.leads_to(made, in_rows(x.shape))


def add_to_view(x: Handle, other: Handle) -> Handle:
    """``view += other``, of all that ``x`` is: backward copies its gradient, and the view's part of that, which is the
    other one's, or is summed to that.

    (torch 2.13, csrc/autograd/functions/tensor.cpp, ``CopySlices``)
    """
    run, made, size = x.run, x.run.view(x.record, x.numel), allocated_bytes(x.numel, x.dtype)
    of_other: int = Gradient.NONE
    if other.requires_grad:
        of_other = Gradient.FRESH if other.numel == x.numel else size
    run.record(
        OperationKind.ADD_IN_PLACE, (x.record, other.record), (made,),
        gradients=(Gradient.FRESH, of_other),
        backward_scratch_bytes=() if other.requires_grad else (RESULT, size),
    )  # fmt: skip
    return x.leads_to(Handle(run, made, x.shape, x.strides), in_rows(x.shape))


def strided(x: Handle, like: Handle) -> Handle:
    """A view that was written through, as autograd sees it from then on: its gradient is a copy.

    (torch 2.13, csrc/autograd/FunctionsManual.cpp, ``as_strided_backward``)
    """
    made = Handle(x.run, x.run.slice(x.record, x.numel), like.shape, like.strides)
    return x.leads_to(made, in_rows(x.shape))
