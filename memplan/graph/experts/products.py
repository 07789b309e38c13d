"""The grouped product that all experts of a mixture share."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, Tensor
from memplan.units import round_up

POINTER_BYTES = 8
SIZES_BYTES = 3 * 4
"""Of a group: rows, columns and what is summed over."""
STRIDE_BYTES = 16
"""What a row of any operand has to be a multiple of (torch 2.13, aten/src/ATen/native/GroupedMMUtils.h,
``check_valid_strides_and_return_transposed``)."""


def _refuse_strides(t: Tape, weight: Parameter) -> None:
    """Refuse experts as torch does; ranks that split them are asked for their share."""
    for width in weight.shape[1:]:
        if width * weight.dtype.num_bytes % STRIDE_BYTES:
            msg = (
                f"{t.source}: experts: rows of {width} numbers in {weight.dtype.label} are no multiple of "
                f"{STRIDE_BYTES} bytes, at which torch's grouped_mm raises; choose widths that are, or a "
                "wider dtype of the weights"
            )
            raise SetupError(msg)


def _scratch(t: Tape, weight: Parameter) -> tuple[int, ...]:
    """What one product takes behind its result: each group's addresses, strides and sizes, and the kernel's workspace.

    (torch 2.13, aten/src/ATen/native/cuda/GroupMM.cu, ``bf16bf16_grouped_gemm_impl_sm90_sm100``)
    """
    if weight.dtype is not DType.BF16 or t.decomposed or not t.grouped_workspace_bytes:
        return ()
    groups = weight.shape[0]
    given_bytes = (
        3 * POINTER_BYTES * round_up(groups, 2) + (3 * POINTER_BYTES + SIZES_BYTES) * groups
    )
    return (
        RESULT,
        round_up(given_bytes, ALLOCATION_ROUNDING),
        round_up(t.grouped_workspace_bytes, ALLOCATION_ROUNDING),
    )


def _twice(scratch: tuple[int, ...]) -> tuple[int, ...]:
    """Of two products, the first of which gives back what it took."""
    return (*scratch, ~2, ~1, *scratch) if scratch else ()


def grouped_matmul(
    t: Tape, x: Tensor, weight: Parameter, offsets: Tensor, factor: Tensor
) -> Tensor:
    """``torch.nn.functional.grouped_mm``: autocast does not know it, so it runs in the weight's dtype.

    ``factor`` is the weight itself, or its sum with an adapter's product.
    """
    _refuse_strides(t, weight)
    x = t.cast(x, weight.dtype)
    _, out_features, in_features = weight.shape
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, weight.dtype)
    scratch = _scratch(t, weight)
    saves = [offsets]
    if factor.requires_grad:
        saves.append(x)
    if x.requires_grad:
        saves.append(factor)
    t.record(
        OperationKind.GROUPED_MM, (x, factor, offsets), (out,), saves=saves,
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE),
        forward_scratch_bytes=scratch,
        backward_scratch_bytes=_twice(scratch) if factor.requires_grad and x.requires_grad else scratch,
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out
