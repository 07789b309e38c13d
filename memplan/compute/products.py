"""The time of a product of matrices: tiles dealt to multiprocessors, wave after wave.

cuBLAS cuts the result into tiles, one for each multiprocessor at a time, and picks the tile that is
done first. A small result leaves multiprocessors idle, a last wave that is half full costs a whole
one, and each tile costs its beginning and its end beside its arithmetic.
"""

from functools import lru_cache
from math import ceil, sqrt
from typing import NamedTuple


class Shape(NamedTuple):
    """``batch`` products of an ``m x k`` and a ``k x n`` matrix."""

    batch: float
    m: float
    n: float
    k: float


class Tile(NamedTuple):
    """What one multiprocessor makes at a time."""

    rows: int
    columns: int
    share: float
    """Of the best rate, what it reaches: small tiles read more for each product."""


TILES = (
    Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.95), Tile(128, 64, 0.75), Tile(64, 64, 0.55),
)  # fmt: skip
"""With these, 318 products of an H100 are told to 6 % in the median (``tests/measured/h100_rates.json``)."""
SPLITS = (1, 2, 4, 8)
"""Ways to cut the inner dimension, the parts added up behind."""
TILE_OVERHEAD_S = 1e-6
"""Filling the pipeline and writing the result, of each wave [s]."""


def shape_of(first: int, second: int, out: int, flops: int) -> Shape:
    """The product's shape, from the elements of its operands and its result.

    ``first`` = batch·m·k, ``second`` = batch·k·n, ``out`` = batch·m·n, ``flops`` = 2·batch·m·n·k.

    >>> shape_of(4 * 2 * 8, 4 * 8 * 3, 4 * 2 * 3, 2 * 4 * 2 * 3 * 8)
    Shape(batch=4, m=2.0, n=3.0, k=8)
    """
    half = flops / 2
    batch = max(1, round(first * second * out / half**2))
    k = max(1, round(sqrt(first * second / (out * batch))))
    return Shape(batch, first / (batch * k), second / (batch * k), k)


ALIGNED = 8
"""Elements whose multiple rows have to be that tensor cores read them whole: 16 bytes of 16 bits."""
UNALIGNED_SHARE, ODD_SHARE = 0.28, 0.17
"""What products with other rows reach of the rate: 180-240 TFLOP/s on an H100 with 30522 columns, 80-150 with
50257."""


def alignment_share(*lengths: float) -> float:
    """Of the best rate, what the lengths of rows leave, as the operands lie in memory [elements].

    >>> alignment_share(50304, 768), alignment_share(50257, 768)
    (1.0, 0.17)
    """
    rows = [round(each) for each in lengths]
    if all(each % ALIGNED == 0 for each in rows):
        return 1.0
    return UNALIGNED_SHARE if all(each % 2 == 0 for each in rows) else ODD_SHARE


@lru_cache(maxsize=65536)
def product_seconds(
    shape: Shape,
    element_bytes: int,
    flops_per_s: float,
    bytes_per_s: float,
    multiprocessors: int,
    made_bytes: int = 0,
) -> float:
    """How long a product takes on the device, its launch left out [s]; ``made_bytes``: of an element of its result, where it is not as
    those of its operands."""
    batch, m, n, k = shape
    each_per_s = flops_per_s / multiprocessors
    best = float("inf")
    for tile in TILES:
        tiles = batch * ceil(m / tile.rows) * ceil(n / tile.columns)
        for split in SPLITS:
            if split > 1 and (k / split < 256 or tiles * split > 4 * multiprocessors):
                break
            waves = ceil(tiles * split / multiprocessors)
            work = 2 * tile.rows * tile.columns * k / split
            seconds = waves * (work / (each_per_s * tile.share) + TILE_OVERHEAD_S)
            if split > 1:
                seconds += 4 * batch * m * n * split / bytes_per_s
            best = min(best, seconds)
    moved = batch * (element_bytes * (m * k + k * n) + (made_bytes or element_bytes) * m * n)
    return max(best, moved / bytes_per_s)
