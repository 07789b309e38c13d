"""What sorting on the GPU asks for: cub's radix sort of pairs of int64, as torch calls it."""

from collections.abc import Sequence
from typing import Self

from memplan.units import ceil_div, round_up

DIGIT_BITS = 8
"""Bits that are sorted by in one pass."""
NUM_DIGITS = 1 << DIGIT_BITS
TILES = {(9, 0): 4608, (8, 0): 3840, (0, 0): 2816}
"""Pairs that one block takes on, by the compute capability from which on it does: 384 threads with 12 or 10
each, 256 with 11 (cub/device/dispatch/tuning/tuning_radix_sort.cuh of CUDA 13.0, ``OnesweepPolicyKey64`` and the
``OnesweepPolicy`` of 800 and 700, halved for 8 bytes; torch 2.13 was asked for ten sorts on five cards)."""
SINGLE_TILE = 2304
"""Up to so many pairs are sorted by one block (``InvokeSingleTile``; torch 2.13 was asked for 17 sizes)."""
ALIGNMENT = 256
SCAN_SCRATCH_BYTES = 1024
"""What a running sum of one row of numbers asks for: what its blocks tell each other, and room to align it
(cub/device/dispatch/dispatch_scan.cuh; torch 2.13 asked for 1,023 bytes for 12 sizes from 8 to 4,096)."""


def sort_tile(compute_capability: tuple[int, int]) -> int:
    """Pairs that one block of a sort takes on.

    >>> sort_tile((9, 0)), sort_tile((8, 9)), sort_tile((7, 5))
    (4608, 3840, 2816)
    """
    return next(tile for least, tile in TILES.items() if compute_capability >= least)


def sort_scratch_bytes(count: int, *, largest_key: int, tile: int) -> int:
    """What a sort of ``count`` pairs asks for beside its two results [bytes].

    Both arrays once more, counts of each digit, and what blocks tell each other
    (cub/device/dispatch/dispatch_radix_sort.cuh, ``InvokeOnesweep``; only as many bits are sorted by
    as the largest key has: aten/src/ATen/cuda/cub.cuh, ``get_num_bits``). A single pass goes from the
    arrays to the results, without a copy. ``tile``: see ``sort_tile``.

    >>> sort_scratch_bytes(32768, largest_key=8191, tile=4608), sort_scratch_bytes(4096, largest_key=511, tile=3840)
    (537088, 72192)
    >>> sort_scratch_bytes(4096, largest_key=255, tile=4608), sort_scratch_bytes(2304, largest_key=511, tile=4608)
    (3584, 512)
    """
    if count <= SINGLE_TILE:
        return 2 * ALIGNMENT
    passes = ceil_div(max(largest_key.bit_length(), 1), DIGIT_BITS)
    counts = passes * NUM_DIGITS * 8
    told = ceil_div(count, tile) * NUM_DIGITS * 4
    copies = 2 * round_up(count * 8, ALIGNMENT) if passes > 1 else 0
    return copies + counts + told + 2 * ALIGNMENT


class SortScratch(int):
    """What one sort asks for [bytes], which knows what it is of: other cards ask for other bytes.

    >>> SortScratch.of(4096, largest_key=511, tile=4608).on(3840)
    72192
    """

    count: int
    largest_key: int

    @classmethod
    def of(cls, count: int, *, largest_key: int, tile: int) -> Self:
        """Of so many pairs, on a card whose blocks take on so many of them."""
        found = cls(sort_scratch_bytes(count, largest_key=largest_key, tile=tile))
        found.count, found.largest_key = count, largest_key
        return found

    def on(self, tile: int) -> Self:
        """Of the same sort on another card."""
        return self.of(self.count, largest_key=self.largest_key, tile=tile)


def sorted_as(scratch: Sequence[int], tile: int) -> Sequence[int]:
    """The temporaries of a kernel with those of its sorts as another card has them; itself where it sorts nothing."""
    if not any(type(each) is SortScratch for each in scratch):
        return scratch
    return tuple(each.on(tile) if isinstance(each, SortScratch) else each for each in scratch)
