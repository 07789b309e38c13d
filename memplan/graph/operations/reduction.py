"""What a sum over rows needs beside its result: a kernel's buffer for partial sums.

torch splits a long column between thread blocks, which write what they have into a buffer and count
themselves in semaphores (aten/src/ATen/native/cuda/Reduce.cuh: ``setReduceConfig``,
``ReduceConfig.global_memory_size``). For every output it reserves a whole row of threads, so the buffer is
a hundred times larger than the partial sums in it.
"""

from functools import lru_cache

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.units import ceil_div, round_up

MAX_THREADS = 512
"""Threads of a block (``mnt_wrapper``)."""
WARP = 32
ACCUMULATOR_BYTES = 4
"""Sums of 16-bit numbers are kept in fp32."""
MIN_VALUES = 16
MAX_VALUES = 256
"""Values that one thread adds up (``min_values_per_thread``, ``max_values_per_thread``)."""
INDEX_LIMIT_BYTES = 2**31
"""Above it the rows are halved until 32 bits can count them (``with_32bit_indexing``)."""
LARGEST_INPUT_BYTES = 2**42
"""No GPU holds 4 TiB: a run with such an input is past saving, and its launches are not counted."""


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """What of a GPU decides how a reduction is split."""

    count: int = 132
    threads: int = 2048
    """That one of them can hold."""


@lru_cache(maxsize=1024)
def column_sum_scratch(
    num_outputs: int, num_rows: int, num_bytes: int, device: Multiprocessors
) -> tuple[tuple[int, ...], ...]:
    """Blocks of scratch of a sum over rows, for each launch [bytes]; ``num_bytes`` are the input's.

    >>> column_sum_scratch(768, 2048, 768 * 2048 * 4, Multiprocessors())
    ((12582912, 512),)
    >>> column_sum_scratch(768, 512, 768 * 512 * 4, Multiprocessors())
    ()
    """
    if num_bytes > LARGEST_INPUT_BYTES:
        return ()
    if num_bytes > INDEX_LIMIT_BYTES and num_rows > 1:
        first = num_rows // 2
        halves = (first, num_rows - first)
        return tuple(
            blocks
            for rows in halves
            for blocks in column_sum_scratch(
                num_outputs, rows, num_bytes * rows // num_rows, device
            )
        )
    vector, width, height = _shape(num_outputs, num_rows)
    values = ceil_div(num_rows, height)
    grid = ceil_div(num_outputs // vector, width)
    target = device.count * (device.threads // (width * height))
    if values < MAX_VALUES or grid > target:
        return ()
    wanted = min(ceil_div(target, grid), ceil_div(values, MIN_VALUES))
    blocks = max(wanted, ceil_div(values, MAX_VALUES))
    if blocks <= 1:
        return ()
    size = ACCUMULATOR_BYTES * num_outputs * blocks * width * vector
    return ((round_up(size, ALLOCATION_ROUNDING), round_up(4 * grid, ALLOCATION_ROUNDING)),)


def may_be_split(num_outputs: int, num_rows: int) -> bool:
    """Whether on some GPU the rows of a sum are split between blocks: how many that GPU decides.

    >>> may_be_split(768, 2048), may_be_split(768, 512)
    (True, False)
    """
    _, _, height = _shape(num_outputs, num_rows)
    return ceil_div(num_rows, height) >= MAX_VALUES


def _shape(num_outputs: int, num_rows: int) -> tuple[int, int, int]:
    """How many outputs a thread loads at once, and threads along and across a row in a block."""
    vector = next(size for size in (4, 2, 1) if num_outputs % size == 0)
    limit = MAX_THREADS // vector
    columns = min(_power_below(num_outputs // vector), limit)
    rows = min(_power_below(num_rows), limit)
    width = min(columns, WARP)
    height = min(rows, limit // width)
    return vector, min(columns, limit // height), height


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 1
