"""How flash attention's second version shares the keys of one query between thread blocks.

Where queries and heads are too few to fill a card, each block of queries is computed by several thread
blocks, one for each stretch of keys, and what they find is put together by another kernel
(csrc/flash_attn/flash_api.cpp: ``set_params_splitkv``, ``num_splits_heuristic``; torch 2.13 has the same in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
"""

from functools import lru_cache
from math import ceil
from struct import pack, unpack

from memplan.fast_dataclass import dataclass
from memplan.units import ceil_div

QUERY_BLOCK = 64
"""Queries of a thread block, as the heuristic counts them."""
MOST_SPLITS = 128
BLOCKS_PER_MULTIPROCESSOR = 2
"""Thread blocks of 128 threads that run at once on one."""
FULL_ENOUGH, GOOD_ENOUGH = 0.8, 0.85
"""Shares of a card, and of the best choice, that are as good as the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashGrid:
    """What of one call decides how it is shared, beside the card."""

    query_blocks: int
    """Of all heads and sequences."""
    key_blocks: int
    """Of one head."""

    @classmethod
    def of(cls, *, heads: int, queries: int, keys: int, head_dim: int) -> "FlashGrid":
        """Of a call with so many heads over the batch."""
        return cls(
            query_blocks=heads * ceil_div(queries, QUERY_BLOCK),
            key_blocks=ceil_div(keys, _keys_of_a_block(head_dim)),
        )


@lru_cache(maxsize=1024)
def num_flash_splits(grid: FlashGrid, multiprocessors: int) -> int:
    """Over how many thread blocks a query's keys are shared; in single precision, as it is computed.

    >>> grid = FlashGrid.of(heads=16, queries=512, keys=512, head_dim=64)
    >>> num_flash_splits(grid, 132), num_flash_splits(grid, 108)
    (2, 1)
    """
    places = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    if grid.query_blocks >= _single(_single(FULL_ENOUGH) * places):
        return 1
    most = max(1, min(MOST_SPLITS, places, grid.key_blocks))
    fillings = {
        splits: _filling(grid.query_blocks * splits, places)
        for splits in range(1, most + 1)
        if splits == 1 or _share(grid, splits) != _share(grid, splits - 1)
    }
    enough = GOOD_ENOUGH * max(fillings.values())
    return next(splits for splits, filling in fillings.items() if filling >= enough)


def _share(grid: FlashGrid, splits: int) -> int:
    """Blocks of keys that one thread block takes, where they are shared by so many."""
    return ceil_div(grid.key_blocks, splits)


def _filling(blocks: int, places: int) -> float:
    """The share of a card that is busy on average."""
    waves = _single(blocks / places)
    return _single(waves / ceil(waves))


def _keys_of_a_block(head_dim: int) -> int:
    if head_dim <= 64:
        return 256
    return 128 if head_dim <= 128 else 64


def _single(number: float) -> float:
    """The nearest number of 32 bits."""
    found: float = unpack("f", pack("f", number))[0]
    return found
