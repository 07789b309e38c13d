"""What attention kernels ask the allocator for and give back before they return [bytes]."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Tensor
from memplan.graph.operations.elementwise import dropout_probability
from memplan.training.choices_of_kernels.flash_splits import FlashGrid
from memplan.units import ceil_div, round_up

WIDE_HEAD = 128
"""Beyond it the memory-efficient kernel sums its result up in memory."""
TILE_HEADER = 4
"""Words before each tile of dq: a lock, a counter, padding (``GradQTempStorage``)."""
KEY_BLOCKS = 200
"""Blocks of keys over all heads that have gradients of their own in that kernel, at most."""
CUDNN_FORWARD_BYTES = 256
"""Workspace of cuDNN's forward plan (cuDNN 9.20)."""
FLASH_HEAD_MULTIPLE = 8
"""Heads are padded to a multiple of this before flash attention."""
FLASH_ROWS = 128
"""Rows to which flash attention's second version rounds each sequence."""


def flash_forward_scratch(t: Tape, shape: Shape) -> tuple[int, ...]:
    """Blocks of scratch inside flash attention's forward kernel, between its results and its random state [bytes].

    Where keys are shared between thread blocks (``memplan.training.choices_of_kernels.flash_splits``), each has a log-sum-exp
    and an fp32 output of its own; dropout is not run so, nor are sequences that lie in one row (csrc/flash_attn/
    flash_api.cpp, ``set_params_splitkv``). Dropout's own state takes the place of one that was made for none (``mha_fwd``).
    """
    spec = shape.spec
    if t.decomposed:
        return ()
    if dropout_probability(t, spec.dropout):
        return (RESULT, RESULT, ALLOCATION_ROUNDING, RESULT, ~2)
    if shape.is_varlen:
        return ()
    head_dim = round_up(spec.head_dim, FLASH_HEAD_MULTIPLE)
    heads = shape.batch * spec.num_heads
    splits = t.flash_splits(
        FlashGrid.of(heads=heads, queries=shape.queries, keys=shape.keys, head_dim=head_dim)
    )
    if splits == 1:
        return ()
    rows = splits * heads * shape.queries
    blocks = _rounded(4 * rows), _rounded(4 * rows * _flash_width(head_dim))
    return (RESULT, RESULT, *blocks, RESULT, ~2, ~3)


def _flash_width(head_dim: int) -> int:
    """Elements of a row of an accumulator: heads are rounded up to 32, wide ones to 64."""
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


def flash_backward_scratch(shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch inside flash attention's backward kernel [bytes].

    An fp32 row statistic, an fp32 accumulator of dq with rows padded to 128 and heads to a multiple
    of 32, beyond 128 of 64, and dk and dv expanded to every query head (csrc/flash_attn/flash_api.cpp,
    ``mha_bwd``; where sequences lie in one row, ``mha_varlen_bwd`` has 128 rows more for each). It is
    counted as ``kernel_scratch``, not where the tape imitates fake tensors.
    """
    spec = shape.spec
    each = shape.queries + FLASH_ROWS if shape.is_varlen else round_up(shape.queries, FLASH_ROWS)
    rows = shape.batch * each
    heads = spec.num_heads
    accumulator = rows * heads * _flash_width(spec.head_dim) * 4
    blocks: tuple[int, ...] = (rows * heads * 4, accumulator)
    if shape.groups > 1:
        expanded = shape.batch * shape.keys * heads * spec.head_dim * DType.BF16.num_bytes
        blocks += (expanded, expanded)
    inner = tuple(_rounded(size) for size in blocks)
    if out.by_head:
        # ``_flash_attention_backward`` wants its output in rows.
        return (out.storage.num_bytes, RESULT, *inner)
    return inner


FLASH3_HEAD_DIMS = (64, 96, 128, 192, 256)
"""Heads that the third version has kernels for; others are rounded up to one of them."""


def flash3_backward_scratch(shape: Shape) -> tuple[int, ...]:
    """Blocks of scratch in the backward pass of flash attention's third version, on Hopper [bytes].

    Two fp32 statistics of each row and an fp32 dq; where heads are grouped, an fp32 dk and dv of the
    key heads (hopper/flash_api.cpp, ``mha_bwd``).

    >>> from memplan.model.attention import AttentionSpec
    >>> spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
    >>> [size // 2**20 for size in flash3_backward_scratch(Shape(1, 2048, 2048, spec))]
    [0, 0, 32, 8, 8]
    """
    spec = shape.spec
    head_dim = next((size for size in FLASH3_HEAD_DIMS if size >= spec.head_dim), spec.head_dim)
    query_tile = 128 if head_dim <= 64 else (64 if spec.causal or head_dim != 128 else 80)
    key_tile = 128 if head_dim <= 128 else (96 if head_dim <= 192 else 80)
    rows = _tiled(shape, shape.queries, query_tile)
    keys = _tiled(shape, shape.keys, key_tile)
    statistic = _rounded(4 * spec.num_heads * rows)
    blocks = (statistic, statistic, _rounded(4 * spec.num_heads * rows * head_dim))
    if shape.groups == 1:
        return blocks
    widened = _rounded(4 * spec.num_kv_heads * keys * head_dim)
    return (*blocks, widened, widened)


def _tiled(shape: Shape, length: int, tile: int) -> int:
    """Rows over the batch, each sequence rounded to tiles, or with one more where they lie in one row."""
    if shape.is_varlen:
        return round_up(shape.batch * (length + tile), tile)
    return shape.batch * round_up(length, tile)


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

    A number for each row and an fp32 dq in tiles, each behind a header; where gradients narrower than fp32
    are not summed up in registers, dk and dv in fp32 too (transformers/cuda/mem_eff_attention/
    kernel_backward.h, ``workspace_size``).
    """
    if t.decomposed:
        return ()
    heads = shape.batch * shape.spec.num_heads
    head_dim, values = shape.spec.head_dim, shape.value_head_dim
    tiles = t.options.sdpa.backward_tiles(dtype, max(head_dim, values))
    found = _padded(shape.queries, tiles.rows) * _padded(head_dim, tiles.columns)
    found += TILE_HEADER * ceil_div(shape.queries, tiles.rows) * ceil_div(head_dim, tiles.columns)
    if dtype.is_half and not tiles.sums_in_registers:
        blocks = min(ceil_div(shape.keys, tiles.columns), max(1, KEY_BLOCKS // heads))
        keys = blocks * tiles.columns
        found += keys * (_padded(head_dim, tiles.rows) + _padded(values, tiles.rows))
    sums, workspace = (_rounded(4 * heads * size) for size in (shape.queries, found))
    if dtype is DType.FP32:
        # The product of output and gradient first, whose rows are then summed.
        return (out.storage.num_bytes, sums, sums, ~1, ~0, workspace, ~2)
    return (sums, workspace, ~0)


def _is_wide(shape: Shape) -> bool:
    return max(shape.spec.head_dim, shape.value_head_dim) > WIDE_HEAD


def _rounded(num_bytes: int) -> int:
    return round_up(num_bytes, ALLOCATION_ROUNDING)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
