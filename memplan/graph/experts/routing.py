"""Routers of mixtures of experts: logits, scores, each token's experts and their weights.

Routers differ from class to class; ``RouterSpec`` says how. Choosing needs no gradient, so only what
the weights are made of is kept.
"""

from collections.abc import Sequence

from memplan.dtypes import DType, promote
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes


def summed_rows(t: Tape, x: Tensor, rows: int) -> Tensor:
    """The sum of each row, whose gradient is spread over it, and cast where that has another format."""
    total = t.tensor(rows, sum_dtype(t, x.dtype))
    gradient = Gradient.ALIAS if total.dtype is x.dtype else Gradient.FRESH
    t.record(OperationKind.SUM, (x,), (total,), gradients=(gradient,))
    return total


def sum_dtype(t: Tape, dtype: DType) -> DType:
    """The format of a sum: autocast asks for fp32 (aten/src/ATen/autocast_mode.h, ``fp32_set_opt_dtype``)."""
    return dtype if t.autocast is None else promote(dtype, DType.FP32)


def divided(t: Tape, x: Tensor, divisor: Tensor, *, in_place: bool) -> Tensor:
    """Each row over a number of its own: what is divided and what by are kept, in place a copy of it.

    The divisor's gradient is ``-grad * ((self / other) / other)``, summed up (FunctionsManual.cpp,
    ``div_tensor_other_grad``); both are made in the wider of the two formats, and cast.
    """
    wide = promote(x.dtype, divisor.dtype)
    kept = t.tensor(x.numel, x.dtype if in_place else wide)
    size, given = allocated_bytes(x.numel, wide), kept.storage.num_bytes
    quotients = () if t.decomposed else (size, size, given, RESULT, ~2, ~1, ~0, RESULT)
    own = Gradient.FRESH if wide is x.dtype else size
    out = t.view(x, x.numel) if in_place else kept
    outputs = (out, kept) if in_place else (out,)
    t.record(
        OperationKind.DIV, (x, divisor), outputs, saves=(divisor, kept if in_place else x),
        gradients=(own, size), backward_scratch_bytes=quotients,
    )  # fmt: skip
    return out


def take(t: Tape, x: Tensor, indices: Tensor, numel: int) -> Tensor:
    """Rows or columns by index: keeps the indices; the gradient is added up in zeros of x's size."""
    out = t.tensor(numel, x.dtype)
    t.record(
        OperationKind.INDEX, (x, indices), (out,), saves=(indices,),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=_index_scratch(t, x, indices, x.numel * indices.numel // numel),
    )  # fmt: skip
    return out


def _index_scratch(t: Tape, x: Tensor, indices: Tensor, rows: int) -> Sequence[int]:
    """Beside the gradient: fake tensors add out of place, the CUDA kernel sorts the indices.

    Indices are copied, counted in elements, and sorted beside their origins
    (aten/src/ATen/native/cuda/Indexing.cu, ``index_put_with_sort_kernel``, torch 2.13).
    """
    if t.decomposed:
        return (allocated_bytes(x.numel, x.dtype),)
    copy = indices.storage.num_bytes
    sorting = t.sort_scratch_bytes(indices.numel, largest_key=rows - 1)
    return copy, copy, ~0, copy, copy, copy, sorting


def top_k(t: Tape, x: Tensor, count: int, *, rows: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and where they are: keeps where."""
    values, indices = t.tensor(count, x.dtype), t.tensor(count, DType.INT64)
    scratch = x.storage.num_bytes if t.decomposed else 0
    t.record(
        OperationKind.TOPK, (x,), (values, indices), saves=(indices,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=t.selection_scratch(rows, x), backward_scratch_bytes=scratch,
    )  # fmt: skip
    return values, indices
