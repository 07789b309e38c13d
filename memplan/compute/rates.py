"""How fast one GPU does what operations ask of it: products of matrices, attention, bytes, launches.

A data sheet's figure is never reached. What is, is told by class of device, never by model: the best
rate that large products hold (measured, or a share of the data sheet's), what a tile of a product
costs beside its arithmetic, the share of the memory's bandwidth that a kernel over a whole tensor
gets, and what it takes the host to ask for a kernel.
"""

from collections.abc import Mapping
from functools import lru_cache

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.operation_kinds import OperationKind
from memplan.hardware.gpu import GpuSpec, num_multiprocessors

DEFAULT_TFLOPS = 312.0
"""Of a card that is known by its memory alone: an A100's."""
DEFAULT_BANDWIDTH = 2_039_000_000_000
"""The same card's memory [bytes/s]."""
SUSTAINED = 0.90
"""Of the best rate of any product (MAMF, ml-engineering), what large ones of one's own shape hold."""
UNMEASURED = 0.72
"""The same, of the data sheet's rate, where no product was measured: the catalog's median of MAMF over
data sheet is 0.80."""
BANDWIDTH_SHARE = 0.88
"""Of the data sheet's bandwidth, what element-wise kernels over large tensors reach."""
KERNEL_S = 2e-6
"""What a kernel takes on the device beside its work: its start, its end and the gap before it [s]."""
HOST_KERNEL_S = 9e-6
"""What it takes Python and torch to ask for a kernel in an eager forward pass [s]."""
HOST_BACKWARD_KERNEL_S = 6e-6
"""The same in autograd's thread, without Python [s]."""
HOST_COMPILED_KERNEL_S = 3e-6
"""The same from inductor's code [s]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rates:
    """What one GPU reaches."""

    flops_per_s: Mapping[DType, float]
    """Of large products, by what they multiply."""
    bytes_per_s: float
    """Of kernels that read and write large tensors."""
    num_multiprocessors: int
    attention: Mapping[OperationKind, tuple[float, float]]
    """What attention's kernels reach forward and backward, in 16 bits [FLOP/s]."""
    third_flash: tuple[float, float]
    """The same of FlashAttention-3."""
    kernel_s: float = KERNEL_S
    host_s: float = HOST_KERNEL_S
    host_backward_s: float = HOST_BACKWARD_KERNEL_S
    host_compiled_s: float = HOST_COMPILED_KERNEL_S

    def rate_of(self, dtype: DType) -> float:
        """Of large products of tensors in this format [FLOP/s]."""
        found = self.flops_per_s.get(dtype)
        return self.flops_per_s[DType.FP32] if found is None else found


Shares = Mapping[OperationKind, tuple[float, float]]
"""Of the data sheet's dense 16-bit rate, what attention's kernels reach forward and backward: long
sequences, heads of 128, a causal mask's half counted."""

_AMPERE: Shares = {
    OperationKind.FLASH_ATTENTION: (0.63, 0.54),
    OperationKind.CUDNN_ATTENTION: (0.63, 0.54),
    OperationKind.EFFICIENT_ATTENTION: (0.36, 0.27),
}
"""A100: FlashAttention-2 reaches 190-210 TFLOP/s forward and 160-185 backward, Triton's and CUTLASS's kernels
of FlashAttention's first form 100-130 and 75-90 (arXiv:2307.08691, figures 4 to 6)."""
_HOPPER: Shares = {
    OperationKind.FLASH_ATTENTION: (0.38, 0.33),
    OperationKind.CUDNN_ATTENTION: (0.58, 0.48),
    OperationKind.EFFICIENT_ATTENTION: (0.20, 0.14),
}
"""H100: FlashAttention-2 has none of its new instructions, 350-400 TFLOP/s forward and 300-330 backward;
cuDNN does, 550-600 and 450-500 (arXiv:2407.08608, figures 5 to 7)."""
_BLACKWELL: Shares = {
    OperationKind.FLASH_ATTENTION: (0.19, 0.16),
    OperationKind.CUDNN_ATTENTION: (0.58, 0.45),
    OperationKind.EFFICIENT_ATTENTION: (0.10, 0.07),
}
"""B200: what does not use its tensor memory is no faster than on H100."""
THIRD_FLASH = (0.65, 0.55)
"""FlashAttention-3 on H100: 640-660 TFLOP/s and 540-560 (arXiv:2407.08608, figures 5 to 7)."""
_BY_CAPABILITY: tuple[tuple[tuple[int, int], Shares], ...] = (
    ((10, 0), _BLACKWELL), ((9, 0), _HOPPER), ((0, 0), _AMPERE),
)  # fmt: skip


@lru_cache(maxsize=64)
def rates_of(gpu: GpuSpec | None) -> Rates:
    """What a GPU reaches; an A100's where nothing is known of it.

    >>> from memplan.sources.catalog import load_gpu
    >>> round(rates_of(load_gpu("a100-80gb")).rate_of(DType.BF16) / 1e12)
    244
    """
    sheet = gpu.dense_tflops if gpu is not None else None
    best = gpu.measured_tflops if gpu is not None else None
    half = (sheet.bf16 or sheet.fp16 or sheet.fp32) if sheet is not None else None
    known = best.bf16 if best is not None else None
    share = UNMEASURED
    if known is not None and half:
        share = SUSTAINED * known / half
    half = half or DEFAULT_TFLOPS

    def reached(rate: float | None, otherwise: float) -> float:
        return (otherwise if rate is None else rate) * share * 1e12

    fp16 = (sheet.fp16 if sheet is not None else None) or half
    single = (sheet.fp32 if sheet is not None else None) or half / 16
    bf16 = sheet.bf16 if sheet is not None and gpu is not None and gpu.has_bf16 else None
    if gpu is not None and not gpu.has_bf16:
        bf16 = single
    fp8 = sheet.fp8 if sheet is not None else None
    measured_fp8 = best.fp8 if best is not None else None
    eight = SUSTAINED * measured_fp8 * 1e12 if measured_fp8 else reached(fp8, half)
    capability = (gpu.compute_capability if gpu is not None else None) or (8, 0)
    shares = next(found for least, found in _BY_CAPABILITY if capability >= least)
    peak = (half if bf16 is None else bf16) * 1e12
    bandwidth = gpu.bandwidth_bytes_per_s if gpu is not None else None
    return Rates(
        flops_per_s={
            DType.BF16: reached(bf16, half),
            DType.FP16: reached(fp16, half),
            DType.FP32: reached(single, single),
            DType.FP8: eight,
            DType.INT8: eight,
        },
        bytes_per_s=BANDWIDTH_SHARE * (bandwidth or DEFAULT_BANDWIDTH),
        num_multiprocessors=num_multiprocessors(gpu),
        attention={kind: (ahead * peak, back * peak) for kind, (ahead, back) in shares.items()},
        third_flash=(THIRD_FLASH[0] * peak, THIRD_FLASH[1] * peak),
    )
