"""Tables that tell FSDP2's copying kernels which block of theirs copies what: a number for each block, and some for each tensor.

One is on the GPU while shards are copied out of an all-gather, one while gradients are laid side by side.
(torch 2.13, aten/src/ATen/native/cuda/TensorShape.cu: ``split_with_sizes_copy_out_cuda_contiguous_no_cast``,
``get_chunk_cat_metadata``, ``pack_vecs``)
"""

from collections.abc import Sequence
from math import isqrt

from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.graph.operations.reduction import Multiprocessors
from memplan.units import ceil_div, round_up

NUMBER_BYTES = 8
THREADS_OF_A_BLOCK = 128
BYTES_OF_A_BLOCK = 16 * THREADS_OF_A_BLOCK
"""What a block writes at once: 16 bytes by each of its threads."""
ROUNDS_OF_BLOCKS = 2
"""The most blocks of a copy out, in what all multiprocessors hold at once."""
NUMBERS_OF_A_PARAMETER, NUMBERS_BESIDE_PARAMETERS = 4, 1
"""Two addresses, its size and the sum of all blocks up to it; that sum has one more."""
NUMBERS_OF_A_GRADIENT, NUMBERS_BESIDE_GRADIENTS = 6, 2
"""Addresses, sizes and places; two of them are sums, with one more."""


def copy_out_table_bytes(chunks: Sequence[int], degree: int, device: Multiprocessors) -> int:
    """The table of ``split_with_sizes_copy`` for one rank's shards of these sizes [bytes].

    A layer of BitNet 2B over eight H100, as PyTorch's CUDA build asks for it (17,352, rounded up):

    >>> chunks = [1638400, 409600, 409600, 1638400, *3 * [4423680], *3 * [640], 1728]
    >>> copy_out_table_bytes(chunks, 8, Multiprocessors())
    17408
    """
    num_blocks = sum(ceil_div(each, BYTES_OF_A_BLOCK) for each in chunks)
    most = device.count * device.threads // THREADS_OF_A_BLOCK * ROUNDS_OF_BLOCKS
    rounds = ceil_div(num_blocks * degree, most)
    chunks_at_once = min(isqrt(max(rounds - 1, 0)) + 1, degree)  # the root, rounded up
    block_bytes = BYTES_OF_A_BLOCK * ceil_div(rounds, chunks_at_once)
    numbers = sum(ceil_div(each, block_bytes) for each in chunks)
    numbers += NUMBERS_OF_A_PARAMETER * len(chunks) + NUMBERS_BESIDE_PARAMETERS
    return round_up(numbers * NUMBER_BYTES, ALLOCATION_ROUNDING)


def copy_in_table_bytes(chunks: Sequence[int]) -> int:
    """The table of ``_chunk_cat`` for gradients of which a rank reduces so much of each [bytes].

    BitNet 2B's tied table and its last norm in fp32, over eight ranks (641,400, rounded up):

    >>> copy_in_table_bytes([164167680, 1280])
    641536
    """
    numbers = sum(ceil_div(each, BYTES_OF_A_BLOCK) for each in chunks)
    numbers += NUMBERS_OF_A_GRADIENT * len(chunks) + NUMBERS_BESIDE_GRADIENTS
    return round_up(numbers * NUMBER_BYTES, ALLOCATION_ROUNDING)
