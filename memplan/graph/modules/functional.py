"""Functions of ``torch`` and ``torch.nn.functional`` on handles, beside those that every decoder calls."""

from math import prod

from memplan.dtypes import DType
from memplan.graph.experts.routing import divided, summed_rows, take, top_k
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import Shape
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import clamped
from memplan.graph.operations.elementwise import softmax as softmax_of
from memplan.graph.operations.products import matmul_weight
from memplan.graph.segments import RESULT, Gradient


def linear(x: Handle, module: Module, weight: Weight, bias: Weight | None = None) -> Handle:
    """``F.linear`` with weights that a module declares by itself."""
    matrix = module.parameter(weight)
    addend = None if bias is None else module.parameter(bias)
    made = matmul_weight(x.run, x.laid(), matrix, addend)
    return Handle(x.run, made, (*x.shape[:-1], weight.shape[0]), flat=True)


def softmax(x: Handle, *, dtype: DType | None = None, in_own_dtype: bool = False) -> Handle:
    """``F.softmax`` over the last dimension; ``in_own_dtype``: the call names the dtype that ``x`` has."""
    return x.like(softmax_of(x.run, x.record, dtype=dtype, in_own_dtype=in_own_dtype))


def topk(x: Handle, count: int) -> tuple[Handle, Handle]:
    """The largest of each row, and where they are."""
    shape = *x.shape[:-1], count
    values, indices = top_k(x.run, x.record, prod(shape))
    return Handle(x.run, values, shape), Handle(x.run, indices, shape)


def total(x: Handle) -> Handle:
    """``x.sum(dim=-1, keepdim=True)``."""
    return Handle(x.run, summed_rows(x.run, x.record, prod(x.shape[:-1])), (*x.shape[:-1], 1))


def quotient(x: Handle, divisor: Handle) -> Handle:
    """``x / divisor``."""
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


def add_in_place(x: Handle, added: Handle) -> Handle:
    """``x.add_(added)``: the gradient of both is the result's own."""
    run = x.run
    made = run.view(x.record, x.numel)
    run.record(
        OperationKind.ADD_IN_PLACE, (x.record, added.record), (made,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS),
    )  # fmt: skip
    return Handle(run, made, x.shape)


def multiply_in_place(x: Handle, noise: Handle) -> Handle:
    """``x *= noise``, which is kept."""
    run = x.run
    made = run.view(x.record, x.numel)
    run.record(
        OperationKind.MUL_IN_PLACE, (x.record, noise.record), (made,), saves=(noise.record,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return x.leads_to(Handle(run, made, x.shape), in_rows(x.shape))


def clamp(x: Handle, *, bounds: int) -> Handle:
    """``x.clamp(...)`` by one number or two."""
    return x.like(clamped(x.run, x.record, bounds=bounds))
