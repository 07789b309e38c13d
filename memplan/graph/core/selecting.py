"""What finding the largest of each row asks for on the GPU, as torch calls it: ``topk`` by several blocks a row."""

from memplan.graph.core.segments import RESULT
from memplan.units import ceil_div, round_up

LEAST_WIDTHS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Up to so many rows, rows so wide are shared out (aten/src/ATen/native/cuda/TensorTopK.cu, ``should_use_multiblock``)."""
LEAST_WIDTH = 400
"""The same of more rows."""
THREADS = 256
BLOCKS_A_MULTIPROCESSOR = 65_536 // (40 * THREADS)
"""That its registers suffice for, at 40 a thread (``get_items_per_thread``)."""
ITEMS = 4, 64
"""Numbers that one thread looks at, at least and at most."""
DIGITS = 256
SCAN_TILE = 3_840
"""Counts that one block of a running sum by key takes on: 3,840 on an A100, 4,032 on an H100, on which this is at most
one step of 256 bytes more (torch 2.13 was asked where its steps are)."""
ALIGNMENT = 256


def is_shared_out(rows: int, width: int) -> bool:
    """Whether several blocks look at a row.

    >>> is_shared_out(1024, 1024), is_shared_out(4096, 384), is_shared_out(4001, 512), is_shared_out(10, 19_999)
    (True, False, True, False)
    """
    return width >= next((least for most, least in LEAST_WIDTHS if rows <= most), LEAST_WIDTH)


def selection_scratch(
    rows: int, width: int, num_bytes: int, multiprocessors: int
) -> tuple[int, ...]:
    """Temporaries behind the two results, in the order in which ``mbtopk::launch`` asks for them [bytes].

    ``num_bytes``: of one number.

    >>> selection_scratch(1024, 1024, 4, 132)[2:9]
    (4096, 8192, 8192, 524288, 1048576, 4096, 4096)
    >>> selection_scratch(1, 1_000_000, 4, 108)[5:9]
    (286208, 1024, 2236, 2236)
    """
    at_once = multiprocessors * BLOCKS_A_MULTIPROCESSOR * THREADS
    items = max(ITEMS[0], min(ceil_div(rows * width, at_once), ITEMS[1]))
    blocks = rows * ceil_div(width, items * THREADS)
    fixed = (
        rows * num_bytes, 2 * rows * 4, 2 * rows * max(num_bytes, 4), blocks * DIGITS * 2,
        rows * DIGITS * 4, blocks * 4, blocks * 4,
    )  # fmt: skip
    sums = _running_sum_bytes(blocks)
    place = 2 + len(fixed)  # each goes before the other comes
    return RESULT, RESULT, *fixed, sums, ~place, sums, ~(place + 2)


def _running_sum_bytes(count: int) -> int:
    """What ``inclusive_sum_by_key`` asks for: what its blocks tell each other, and the key before each of them.

    >>> _running_sum_bytes(1024), _running_sum_bytes(262_144)
    (1279, 2559)
    """
    tiles = ceil_div(count, SCAN_TILE)
    told, keys = round_up((tiles + 32) * 16, ALIGNMENT), round_up((tiles + 1) * 4, ALIGNMENT)
    return told + keys + ALIGNMENT - 1
