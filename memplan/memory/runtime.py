"""What no formula knows: CUDA context, NCCL, fragmentation; as ranges with their sources.

cuBLAS workspaces are known, and are part of the peak.
"""

from memplan.records import dataclass
from memplan.units import GIB, KIB, MIB

CONTEXT_BYTES = (int(0.4 * GIB), int(1.4 * GIB))
"""CUDA context with lazily loaded kernels: 0.4-0.6 GiB at start, up to 1.4 GiB in training runs
(ml-engineering, training/performance and debug/pytorch.md; pytorch issues 107667, 109888)."""
NCCL_BYTES = (int(0.5 * GIB), int(2.0 * GIB))
"""NCCL's buffers where there is more than one GPU: 544 MB for two A100s to 1-2 GiB for eight GPUs
(NVIDIA/nccl issues 964 and 864; ml-engineering, debug/pytorch.md)."""
RESERVED_OVER_ALLOCATED = (1.03, 1.25)
"""What the caching allocator reserves for each byte allocated at the peak: 1.028-1.093 for
Megatron on B200 (SimuMax, 19 runs), 1.18-1.36 for eager FSDP on Llama-2-7B (torchtitan #165)."""

WORKSPACE_BYTES = 4096 * KIB * 2 + 16 * KIB * 8
"""cuBLAS workspace of one handle and stream (torch 2.13, CublasHandlePool.cpp)."""
HOPPER_WORKSPACE_BYTES = 32 * MIB
"""The same on compute capability 9, 10 and 12 (pytorch PR 175344)."""
NUM_HANDLES = 2
"""The backward pass runs in a thread of its own, with a handle of its own."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A figure known only within limits [bytes]."""

    low: int
    high: int


def workspace_bytes(compute_capability: tuple[int, int] | None) -> int:
    """cuBLAS workspaces of one process [bytes].

    >>> workspace_bytes((8, 0)), workspace_bytes((9, 0))
    (17039360, 67108864)
    """
    major = compute_capability[0] if compute_capability is not None else 0
    each = HOPPER_WORKSPACE_BYTES if major in (9, 10, 12) else WORKSPACE_BYTES
    return NUM_HANDLES * each


def total_range(peak_bytes: int, *, num_gpus: int) -> ByteRange:
    """What nvidia-smi would show at the worst moment [bytes].

    Equation: ``peak x reserved/allocated + context (+ NCCL)``, both ends of every range.
    """
    ends = []
    for end in (0, 1):
        total = int(peak_bytes * RESERVED_OVER_ALLOCATED[end]) + CONTEXT_BYTES[end]
        ends.append(total + (NCCL_BYTES[end] if num_gpus > 1 else 0))
    return ByteRange(ends[0], ends[1])
