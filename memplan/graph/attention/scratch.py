"""What attention kernels ask the allocator for and give back before they return [bytes]."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.segments import RESULT
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Tensor
from memplan.units import ceil_div, round_up

NARROW_TILE, WIDE_TILE = 64, 128
"""Rows and columns of the memory-efficient kernel's tiles; heads beyond the latter are wide."""
TILE_HEADER = 4
"""Words before each tile of dq: a lock, a counter, padding (``GradQTempStorage``)."""
KEY_BLOCKS = 200
"""Blocks of keys over all heads that have gradients of their own in that kernel, at most."""
CUDNN_FORWARD_BYTES = 256
"""Workspace of cuDNN's forward plan (cuDNN 9.20)."""


def flash_backward_scratch(shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch inside flash attention's backward kernel [bytes].

    An fp32 row statistic, an fp32 accumulator of dq with rows padded to 128 and heads to a multiple
    of 32, and dk and dv expanded to every query head (csrc/flash_attn/flash_api.cpp,
    ``mha_bwd``). It is counted as ``kernel_scratch``, not where the tape imitates fake tensors.
    """
    spec = shape.spec
    rows = shape.batch * (-(-shape.queries // 128) * 128)
    heads = spec.num_heads
    accumulator = rows * heads * (-(-spec.head_dim // 32) * 32) * 4
    blocks: tuple[int, ...] = (rows * heads * 4, accumulator)
    if shape.groups > 1:
        expanded = shape.batch * shape.keys * heads * spec.head_dim * DType.BF16.num_bytes
        blocks += (expanded, expanded)
    inner = tuple(_rounded(size) for size in blocks)
    if out.by_head:
        # ``_flash_attention_backward`` wants its output in rows.
        return (out.storage.num_bytes, RESULT, *inner)
    return inner


def cudnn_forward_scratch(t: Tape) -> int:
    """Workspace of cuDNN's forward plan [bytes]."""
    return 0 if t.decomposed else _rounded(CUDNN_FORWARD_BYTES)


def cudnn_backward_scratch(t: Tape, shape: Shape, key: Tensor) -> int:
    """Workspace of cuDNN's backward plan [bytes]: an fp32 dq, a sum for each row of it, and where
    key heads serve several query heads, dk and dv of every query head.

    cuDNN 9.20 asks for as much, on cards described to it, and what it asks for in the forward pass.
    """
    if t.decomposed:
        return 0
    spec = shape.spec
    rows = shape.rows * spec.num_heads
    found = 4 * rows * (spec.head_dim + 1) + CUDNN_FORWARD_BYTES
    heads = key.numel // (shape.batch * shape.keys * spec.head_dim)
    if heads < spec.num_heads:
        widths = spec.head_dim + shape.value_head_dim
        found += 2 * shape.batch * shape.keys * spec.num_heads * widths
    return _rounded(found)


def efficient_forward_scratch(t: Tape, dtype: DType, shape: Shape) -> int:
    """An fp32 output, where heads are too large for the registers and the result is narrower."""
    if t.decomposed or not dtype.is_half or not _is_wide(shape):
        return 0
    return _rounded(4 * shape.outputs)


def efficient_backward_scratch(t: Tape, dtype: DType, shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch in the memory-efficient kernel's backward pass [bytes].

    A number for each row and an fp32 dq in tiles, each behind a header; where heads are wide and the
    gradients narrower than fp32, dk and dv in fp32 too (transformers/cuda/mem_eff_attention/
    kernel_backward.h, ``workspace_size``).
    """
    if t.decomposed:
        return ()
    heads = shape.batch * shape.spec.num_heads
    head_dim, values = shape.spec.head_dim, shape.value_head_dim
    wide = dtype.is_half and _is_wide(shape)
    tile = NARROW_TILE if not wide else WIDE_TILE
    columns = NARROW_TILE if not dtype.is_half or wide or head_dim <= NARROW_TILE else WIDE_TILE
    found = _padded(shape.queries, tile) * _padded(head_dim, columns)
    found += TILE_HEADER * ceil_div(shape.queries, tile) * ceil_div(head_dim, WIDE_TILE)
    if wide:
        blocks = min(-(-shape.keys // NARROW_TILE), max(1, KEY_BLOCKS // heads))
        keys = blocks * NARROW_TILE
        found += keys * (_padded(head_dim, WIDE_TILE) + _padded(values, WIDE_TILE))
    sums, workspace = (_rounded(4 * heads * size) for size in (shape.queries, found))
    if dtype is DType.FP32:
        # The product of output and gradient first, whose rows are then summed.
        return (out.storage.num_bytes, sums, sums, ~1, ~0, workspace, ~2)
    return (sums, workspace, ~0)


def _is_wide(shape: Shape) -> bool:
    return max(shape.spec.head_dim, shape.value_head_dim) > WIDE_TILE


def _rounded(num_bytes: int) -> int:
    return round_up(num_bytes, ALLOCATION_ROUNDING)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
