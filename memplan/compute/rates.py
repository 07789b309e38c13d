"""How fast one GPU does what operations ask of it: products of matrices, attention, bytes, launches.

A data sheet's figure is never reached. What is, is told by class of device, never by model: the best
rate that large products hold (measured, or a share of the data sheet's), what a tile of a product
costs beside its arithmetic, the share of the memory's bandwidth that a kernel over a whole tensor
gets, and what it takes the host to ask for a kernel.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.hardware.gpu import GpuSpec, TflopsByDtype, num_multiprocessors
from memplan.hardware.power import board_power

DEFAULT_TFLOPS = 312.0
"""Of a card that is known by its memory alone: an A100's."""
DEFAULT_BANDWIDTH = 2_039_000_000_000
"""The same card's memory [bytes/s]."""
SUSTAINED = 0.88
"""Of the best rate of any product (MAMF, ml-engineering), what large ones hold in a long run: an H100 reaches
794 TFLOP/s in bursts and 700 over seconds, at its limit of power (``tests/measured/h100_rates.json``)."""
UNMEASURED = 0.70
"""The same, of the data sheet's rate, where no product was measured: 0.88 of the catalog's median MAMF."""


class Limited(NamedTuple):
    """What large products hold at a limit of power."""

    flops_per_s: float
    """In 16 bits."""
    watts: float
    multiprocessors: int


LIMITED: Mapping[int, Limited] = {
    9: Limited(700e12, 700, 132), 10: Limited(1100e12, 1000, 148),
}  # fmt: skip
"""By architecture. H100: 700 W (``sustained_tflops`` of ``tests/measured/h100_rates.json``). B200: of 250 products of more than
10^12 FLOPs the median holds 1,090 TFLOP/s, where bursts reach 1,745 (SimuMax 1.2, configs/system/b200_bf16_ceperm.json,
``accurate_efficient_factor``)."""
HOPPER = 9
"""Compute capability whose tensor cores add up products of 8 bits in 14 bits unless told otherwise."""
SPLIT_ACCUMULATOR = 1.15
"""How many times as long products of 8 bits take on Hopper whose sums go to a second register on the way: fast accumulation was measured to
be 1.1 to 1.2 times as fast (pytorch/ao #2377). Recipes leave it out where gradients are made: torchao's default
(torchao/float8/config.py), TransformerEngine's ``delayed`` (``_2X_ACC_DGRAD``, pytorch/module/base.py) and ``current`` (``MMParams``,
common/recipe/__init__.py)."""
POWER_EXPONENT = 1 / 2
"""A chip's power grows with the cube of its clock where voltage follows, and with the clock where voltage is at its floor:
an assumption in between."""
MEASURED_SHARES: Mapping[tuple[int, int], float] = {(8, 0): 0.87, (9, 0): 0.80, (10, 0): 0.775}
"""Of the data sheet's rate, the best of any product on the measured card of an architecture (A100, H100, B200: the catalog's
MAMF): of its relatives that were not measured, as the A800, H800 and H20."""
COMPARED_CARDS = frozenset(
    {
        "A100 SXM4 40GB",
        "A100 SXM4 80GB",
        "A100 PCIe 40GB",
        "A100 PCIe 80GB",
        "H100 SXM5 80GB",
        "H200 SXM 141GB",
    }
)
"""On which whole steps were measured and compared (``tests/measured``, ``tests/data/published_throughput.jsonl``)."""
SINGLE_SHARE = 0.75
"""The same in fp32 without tensor cores, which stays below the limit of power: 50 of an H100's 67 TFLOP/s."""
BANDWIDTH_SHARE = 0.90
"""Of the data sheet's bandwidth, what element-wise kernels over large tensors reach: 3.0 of 3.35 TB/s on an
H100."""
KERNEL_S = 2e-6
"""What a kernel takes on the device beside its work: its start, its end and the gap before it [s]."""
UPDATE_SHARE = 0.78
"""Of what element-wise kernels reach, what an optimizer's multi-tensor kernels do: 2.4 TB/s on an H100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRate:
    """What a kernel of attention reaches on long sequences with heads of 128, in 16 bits [FLOP/s]."""

    forward: float
    backward: float
    half_head: float = 0.84
    """Of that with heads of 64."""


class Cache(NamedTuple):
    """The second-level cache, which all multiprocessors share."""

    num_bytes: int
    bytes_per_s: float
    """Of kernels whose tensors lie in it."""


CACHE_PER_MULTIPROCESSOR = 38e9
"""What kernels read from and write to the cache on each multiprocessor [bytes/s]: 5.0 TB/s on an H100, whose copies of
16 MiB take 8.7 microseconds with the launch's two (``d2d`` of ``tests/measured/h100_rates.json``); elsewhere an assumption."""
_MIB = 2**20
_CACHES: tuple[tuple[tuple[int, int], int], ...] = (
    ((12, 0), 96 * _MIB), ((10, 0), 126 * _MIB), ((9, 0), 50 * _MIB), ((8, 9), 72 * _MIB),
    ((8, 1), 6 * _MIB), ((8, 0), 40 * _MIB), ((7, 5), 4 * _MIB), ((0, 0), 6 * _MIB),
)  # fmt: skip
"""By architecture, from NVIDIA's white papers: H100 50 MiB (of both halves), A100 40, GA10x 6, Turing's T4 4."""
_ADA: Mapping[int, int] = {58: 48, 60: 48, 76: 64, 128: 72, 142: 96}
"""Ada's cards by their multiprocessors [MiB]: L4, 4070 Ti, 4080, 4090, and L40, L40S and 6000 Ada (arXiv:2606.22588:
an L40 has 96)."""


def cache_of(gpu: GpuSpec | None) -> Cache:
    """A GPU's second-level cache, by its architecture.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> [cache_of(load_gpu(each)).num_bytes >> 20 for each in ("h100", "l40s", "rtx3090")]
    [50, 96, 6]
    """
    capability = (gpu.compute_capability if gpu is not None else None) or (8, 0)
    count = num_multiprocessors(gpu)
    size = next(found for least, found in _CACHES if capability >= least)
    if capability == (8, 9):
        size = _ADA.get(count, 72) * _MIB
    return Cache(size, CACHE_PER_MULTIPROCESSOR * count)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rates:
    """What one GPU reaches."""

    flops_per_s: Mapping[DType, float]
    """Of large products, by what they multiply."""
    bytes_per_s: float
    """Of kernels that read and write large tensors."""
    num_multiprocessors: int
    cache: Cache
    attention: Mapping[OperationKind, AttentionRate]
    third_flash: AttentionRate
    kernel_s: float = KERNEL_S
    narrow_back: float = 1.0
    """How many times as long as forward products of 8 bits take that make gradients."""
    unpacks_at_once: bool = False
    """GPTQ's weights are unpacked by one kernel, as AutoGPTQ's Triton does, and not by PyTorch's operations."""

    def rate_of(self, dtype: DType) -> float:
        """Of large products of tensors in this format [FLOP/s]."""
        found = self.flops_per_s.get(dtype)
        return self.flops_per_s[DType.FP32] if found is None else found


Shares = Mapping[OperationKind, tuple[float, float, float]]
"""Of the data sheet's dense 16-bit rate, what attention's kernels reach forward and backward on long sequences
with heads of 128, and of that with heads of 64."""

_AMPERE: Shares = {
    OperationKind.FLASH_ATTENTION: (0.66, 0.60, 0.90),
    OperationKind.CUDNN_ATTENTION: (0.66, 0.60, 0.90),
    OperationKind.EFFICIENT_ATTENTION: (0.38, 0.29, 0.90),
}
"""A100: FlashAttention-2 reaches 200-210 TFLOP/s forward and 180-190 backward, Triton's and CUTLASS's kernels
of FlashAttention's first form 100-130 and 75-90 (arXiv:2307.08691, figures 4 to 6)."""
_HOPPER: Shares = {
    OperationKind.FLASH_ATTENTION: (0.35, 0.31, 0.93),
    OperationKind.CUDNN_ATTENTION: (0.67, 0.59, 0.74),
    OperationKind.EFFICIENT_ATTENTION: (0.21, 0.15, 0.90),
}
"""H100, measured: 350 TFLOP/s forward and 310 backward of FlashAttention-2, which has none of its new
instructions; 660 and 585 of cuDNN (``tests/measured/h100_rates.json``)."""
_BLACKWELL: Shares = {
    OperationKind.FLASH_ATTENTION: (0.16, 0.14, 0.93),
    OperationKind.CUDNN_ATTENTION: (0.60, 0.47, 0.74),
    OperationKind.EFFICIENT_ATTENTION: (0.10, 0.07, 0.90),
}
"""B200: what does not use its tensor memory is no faster than on H100; an assumption."""
THIRD_FLASH = (SUSTAINED * 0.67, SUSTAINED * 0.57, 0.75)
"""FlashAttention-3 on H100: 640-660 TFLOP/s and 540-560 in short benchmarks (arXiv:2407.08608, figures 5 to 7),
which are bursts as those of products are."""
_BY_CAPABILITY: tuple[tuple[tuple[int, int], Shares], ...] = (
    ((10, 0), _BLACKWELL), ((9, 0), _HOPPER), ((0, 0), _AMPERE),
)  # fmt: skip


def is_compared(gpu: GpuSpec | None) -> bool:
    """Whether whole steps on such a card were measured, and compared with what is said of them."""
    return gpu is not None and gpu.name in COMPARED_CARDS


@lru_cache(maxsize=64)
def rates_of(gpu: GpuSpec | None) -> Rates:
    """What a GPU reaches; an A100's where nothing is known of it.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> round(rates_of(load_gpu("a100-80gb")).rate_of(DType.BF16) / 1e12)
    239
    """
    sheet = gpu.dense_tflops if gpu is not None else TflopsByDtype()
    half = sheet.bf16 or sheet.fp16 or sheet.fp32 or DEFAULT_TFLOPS
    share = min(_sustained_share(gpu, half), _limited_share(gpu, half))
    single = SINGLE_SHARE / share * (sheet.fp32 or half / 16)
    bf16 = (sheet.bf16 or half) if gpu is None or gpu.has_bf16 else single
    eight = _eight_bits(gpu, half) or (sheet.fp8 or half) * share * 1e12
    capability = (gpu.compute_capability if gpu is not None else None) or (8, 0)
    shares = next(found for least, found in _BY_CAPABILITY if capability >= least)
    bandwidth = gpu.bandwidth_bytes_per_s if gpu is not None else None
    return Rates(
        flops_per_s={
            DType.BF16: bf16 * share * 1e12,
            DType.FP16: (sheet.fp16 or half) * share * 1e12,
            DType.FP32: single * share * 1e12,
            DType.FP8: eight,
            DType.INT8: eight,
        },
        bytes_per_s=BANDWIDTH_SHARE * (bandwidth or DEFAULT_BANDWIDTH),
        num_multiprocessors=num_multiprocessors(gpu),
        cache=cache_of(gpu),
        attention={kind: _attention(found, bf16 * 1e12) for kind, found in shares.items()},
        third_flash=_attention(THIRD_FLASH, bf16 * 1e12),
        narrow_back=SPLIT_ACCUMULATOR if capability[0] == HOPPER else 1.0,
    )


def _sustained_share(gpu: GpuSpec | None, half: float) -> float:
    """Of the data sheet's rate, what large products hold, by what was measured of the card or of its relatives."""
    if gpu is None:
        return UNMEASURED
    if gpu.measured_tflops.bf16 is not None:
        return SUSTAINED * gpu.measured_tflops.bf16 / half
    relative = MEASURED_SHARES.get(gpu.compute_capability or (0, 0))
    return UNMEASURED if relative is None else SUSTAINED * relative


def _eight_bits(gpu: GpuSpec | None, half: float) -> float | None:
    """What large products of fp8 hold where they were measured [FLOP/s]; None elsewhere."""
    measured = gpu.measured_tflops.fp8 if gpu is not None else None
    if gpu is None or not measured:
        return None
    limited = _limited_share(gpu, half) * (gpu.dense_tflops.fp8 or half)
    return min(SUSTAINED * measured, limited) * 1e12


def _limited_share(gpu: GpuSpec | None, half: float) -> float:
    """Of the data sheet's rate, what a card's limit of power leaves to large products in a long run."""
    capability = gpu.compute_capability if gpu is not None else None
    watts = board_power(gpu) if gpu is not None else None
    known = LIMITED.get(capability[0]) if capability is not None else None
    if known is None or watts is None:
        return 1.0
    clock = float((watts / known.watts) ** POWER_EXPONENT)
    chip = num_multiprocessors(gpu) / known.multiprocessors
    return clock * chip * known.flops_per_s / (half * 1e12)


def _attention(shares: tuple[float, float, float], peak: float) -> AttentionRate:
    forward, backward, half_head = shares
    return AttentionRate(forward=forward * peak, backward=backward * peak, half_head=half_head)
