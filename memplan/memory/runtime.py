"""What lies outside the allocator, CUDA context and NCCL, as ranges with their sources.

cuBLAS workspaces are known, and are part of the peak.
"""

from memplan.fast_dataclass import dataclass
from memplan.units import GIB, KIB, MIB

CONTEXT_GIB: dict[int, tuple[float, float]] = {
    7: (0.1, 1.35), 8: (0.25, 0.8), 9: (0.5, 1.25), 10: (0.7, 1.5), 12: (0.25, 0.8),
}  # fmt: skip
"""CUDA context with its kernels, by the major compute capability [GiB]: T4 0.11-0.15 and V100 with
drivers before lazy loading up to 1.31; RTX 30/40, A100 0.25-0.95; H100, H200 0.48-1.21; B200 0.70
(Hugging Face's perf_train_gpu_one page; ml-engineering, training/performance; fms-acceleration's
benchmarks; PEFT's method comparison: nvidia-smi less what is reserved). Measured for memplan on one
H100 with driver 580 and CUDA 13: 0.60 bare, 0.73-0.85 after training steps (``tests/measured/h100.json``)."""
UNKNOWN_CONTEXT_GIB = (0.25, 1.5)
"""The same for cards whose capability is not known."""
NCCL_GIB = (0.5, 2.0)
"""NCCL's buffers of the first communicator [GiB]: 544 MB for two A100s to 1-2 GiB for eight GPUs
(NVIDIA/nccl issues 964 and 864; ml-engineering, debug/pytorch.md). Of one H200 by itself under DeepSpeed 0.86
(``tests/measured/sent``)."""
NCCL_FURTHER_GIB = (0.0, 0.65)
"""Of each further communicator [GiB]: 544 MB of two A100s, 688 MB of three or four (NVIDIA/nccl issue 964; RCCL: 1 GiB,
and 0.65 for each further one)."""
NCCL_ALL_TO_ALL_GIB = (0.0, 3.05)
"""Of a communicator over which each rank sends to each [GiB]: channels to every peer are connected at the first
such exchange, 32 for each pair of eight H100s (NVIDIA/nccl issue 1685: 4.34 GB beside PyTorch's memory behind the first
``all_to_all_single``, 1.06 GB before it)."""
SURELY_ENOUGH = 2
"""As much more than is allocated at once is enough for any run without a replay: segments with room to
spare were 1.93 times that at most (FSDP2; ``allocator.jsonl``, 154 runs of PyTorch's CUDA build), the least
that was needed 1.32 times. It settles verdicts; no figure is made of it."""

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

    def __str__(self) -> str:
        """As reports write it.

        >>> str(ByteRange(1 << 30, 3 << 29))
        '1.0-1.5 GiB'
        """
        return f"{self.low / GIB:,.1f}-{self.high / GIB:,.1f} GiB"

    def up_to(self, other: "ByteRange") -> "ByteRange":
        """From its own low end to another's high one.

        >>> ByteRange(1, 2).up_to(ByteRange(3, 4))
        ByteRange(low=1, high=4)
        """
        return ByteRange(self.low, other.high)


def workspace_bytes(compute_capability: tuple[int, int] | None) -> int:
    """cuBLAS workspaces of one process [bytes].

    >>> workspace_bytes((8, 0)), workspace_bytes((9, 0))
    (17039360, 67108864)
    """
    major = compute_capability[0] if compute_capability is not None else 0
    each = HOPPER_WORKSPACE_BYTES if major in (9, 10, 12) else WORKSPACE_BYTES
    return NUM_HANDLES * each


def overhead_range(
    compute_capability: tuple[int, int] | None, *, num_communicators: int, num_all_to_all: int = 0
) -> ByteRange:
    """What lies beside the allocator's segments: context, and NCCL where it has communicators [bytes].

    ``num_all_to_all`` of these exchange from each rank to each.

    >>> overhead_range((8, 0), num_communicators=0)
    ByteRange(low=268435456, high=858993459)
    """
    context = context_gib(compute_capability)
    nccl = nccl_gib(num_communicators, num_all_to_all=num_all_to_all)
    return _in_bytes((context[0] + nccl[0], context[1] + nccl[1]))


def context_range(compute_capability: tuple[int, int] | None) -> ByteRange:
    """CUDA context with its kernels [bytes].

    >>> context_range((9, 0))
    ByteRange(low=536870912, high=1342177280)
    """
    return _in_bytes(context_gib(compute_capability))


def nccl_range(num_communicators: int, *, num_all_to_all: int = 0) -> ByteRange:
    """NCCL's buffers [bytes].

    >>> nccl_range(0), nccl_range(1)
    (ByteRange(low=0, high=0), ByteRange(low=536870912, high=2147483648))
    """
    return _in_bytes(nccl_gib(num_communicators, num_all_to_all=num_all_to_all))


def context_gib(compute_capability: tuple[int, int] | None) -> tuple[float, float]:
    """The range of a card's context [GiB]."""
    if compute_capability is None:
        return UNKNOWN_CONTEXT_GIB
    return CONTEXT_GIB.get(compute_capability[0], UNKNOWN_CONTEXT_GIB)


def nccl_gib(num_communicators: int, *, num_all_to_all: int = 0) -> tuple[float, float]:
    """That of NCCL's buffers [GiB]."""
    if not num_communicators:
        return 0.0, 0.0
    low, high = (
        first + (num_communicators - 1) * further + num_all_to_all * spread
        for first, further, spread in zip(
            NCCL_GIB, NCCL_FURTHER_GIB, NCCL_ALL_TO_ALL_GIB, strict=True
        )
    )
    return low, high


def _in_bytes(ends: tuple[float, float]) -> ByteRange:
    low, high = (int(each * GIB) for each in ends)
    return ByteRange(low, high)
