"""What scans in chunks have in common: padding, running sums, masks of earlier and later tokens."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.modules.functional import masked_fill
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import Straightened, always, in_rows
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import (
    dense_strides,
    is_channels_last,
    is_contiguous,
    row_strides,
)
from memplan.units import ceil_div


def padded(x: Handle, length: int, dim: int = 1) -> Handle:
    """``F.pad(x, ...)`` to so many of a dimension: a copy, made even where nothing is missing.

    It lies with its channels last where what is given does, and a copy of all of it as that
    (ATen/native/PadNd.cpp, ``suggest_memory_format``, ``clone``).
    """
    shape = list(x.shape)
    shape[dim] = length
    run, made = x.run, empty(x.run, tuple(shape), x.dtype)
    if is_channels_last(x.shape, x.strides) or made.shape == x.shape:
        made.strides = dense_strides(made.shape, x.strides)
    run.record(OperationKind.PAD, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    given = x.shape
    return x.leads_to(made, lambda lies: dense_strides(given, lies))


def whole(length: int, chunk: int) -> int:
    """Tokens of whole chunks."""
    return ceil_div(length, chunk) * chunk


def running_sum(x: Handle) -> Handle:
    """``x.cumsum(dim=-1)``, or any other: what is seen in another order is copied for the kernel, and so is a gradient."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    size = made.record.storage.num_bytes
    copied = not run.decomposed and not is_contiguous(x.shape, x.strides)
    run.record(
        OperationKind.CUMSUM, (x.record,), (made.record,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(RESULT, size) if copied else (),
        backward_scratch_bytes=(size, size, RESULT),
    )  # fmt: skip
    operation = run.segment.operations[-1]

    def copy_turned() -> None:
        operation.backward_scratch = size, size, size, ~2, RESULT

    copies = None if run.decomposed else Straightened(copy_turned)
    return x.leads_to(made, in_rows(x.shape), copies)


def segment_sum(x: Handle) -> Handle:
    """Sums of every stretch of tokens: a running sum, masked before and after."""
    length = x.shape[-1]
    x = spread(x, length)
    mask = below_diagonal(x.run, length)
    x = masked_fill(x, mask.apart(OperationKind.BITWISE_NOT))
    sums = running_sum(x)
    mask = below_diagonal(x.run, length)
    sums = masked_fill(sums, mask.apart(OperationKind.BITWISE_NOT))
    return sums


def spread(x: Handle, times: int) -> Handle:
    """``x[..., None].expand(*x.shape, times)``."""
    run, shape, lies = x.run, (*x.shape, times), row_strides((*x.shape, 1))
    x = x.seen_as(*x.shape, 1)
    made = Handle(run, run.view(x.record, x.numel * times), shape, (*x.strides[:-1], 0))
    run.record(OperationKind.VIEW, (x.record,), (made.record,), gradients=(Gradient.SUMMED,))
    return x.leads_to(made, always(lies))


def below_diagonal(run: Run, length: int) -> Handle:
    """``torch.tril(torch.ones(length, length, dtype=torch.bool))``."""
    ones = made_by(run, OperationKind.ONES, (length, length), DType.BOOL)
    return ones.apart(OperationKind.TRIL)
