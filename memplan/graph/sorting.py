"""What sorting on the GPU asks for: cub's radix sort of pairs of int64, as torch calls it."""

from memplan.units import ceil_div

DIGIT_BITS = 8
"""Bits that are sorted by in one pass."""
NUM_DIGITS = 1 << DIGIT_BITS
TILE = 4224
"""Pairs that one block takes on; three counts of pairs seen agree with 4096 to 4681."""
SINGLE_TILE = 2304
"""Up to so many pairs are sorted by one block (``InvokeSingleTile``; torch 2.13 was asked for 17 sizes)."""
ALIGNMENT = 256


def sort_scratch_bytes(count: int, *, largest_key: int) -> int:
    """What a sort of ``count`` pairs asks for beside its two results [bytes].

    Both arrays once more, counts of each digit, and what blocks tell each other
    (cub/device/dispatch/dispatch_radix_sort.cuh, ``InvokeOnesweep``; only as many bits are sorted by
    as the largest key has: aten/src/ATen/cuda/cub.cuh, ``get_num_bits``). A single pass goes from the
    arrays to the results, without a copy.

    >>> sort_scratch_bytes(32768, largest_key=8191), sort_scratch_bytes(4096, largest_key=511)
    (537088, 71168)
    >>> sort_scratch_bytes(4096, largest_key=255), sort_scratch_bytes(2304, largest_key=511)
    (3584, 512)
    """
    if count <= SINGLE_TILE:
        return 2 * ALIGNMENT
    passes = ceil_div(max(largest_key.bit_length(), 1), DIGIT_BITS)
    counts = passes * NUM_DIGITS * 8
    told = ceil_div(count, TILE) * NUM_DIGITS * 4
    copies = 2 * count * 8 if passes > 1 else 0
    return copies + counts + told + 2 * ALIGNMENT
