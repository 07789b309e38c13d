"""Which kernel torch's ``scaled_dot_product_attention`` runs: by card, dtype, mask and sizes.

The dispatcher asks the kernels in a fixed order and takes the first that can: cuDNN's (on Hopper and
data-centre Blackwell alone), flash, memory-efficient, math. What each card's kernels take is data,
``SDPA_SUPPORT``; ``choose_sdpa_kernel`` is the order. Read in torch 2.13
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) and asked of its CUDA build, card by card:
``tests/data/attention_kernels.json``.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.managers import MemoryManager

MAX_FLASH_HEAD_DIM = 256
"""Largest head that flash attention takes (csrc/flash_attn/flash_api.cpp)."""
ALIGNED_HEAD_MULTIPLE = 8
"""16-bit heads come in multiples of this for cuDNN: 16 bytes."""
LATENT_HEAD_DIMS = (192, 128)
"""DeepSeek's heads, of queries and of values, which cuDNN takes beyond its usual limit."""


class ScoreKernel(Enum):
    """What computes the scores in the end."""

    EAGER = "eager"
    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A form of the memory-efficient kernel's backward pass (``kernel_backward.h``, ``AttentionBackwardKernel``)."""

    widest: int
    """Head, of keys or values, up to which it is taken; the last form takes all."""
    rows: int
    """Queries of a tile (``kBlockSizeI``)."""
    columns: int
    """Keys of it, and elements of a head (``kBlockSizeJ``)."""
    sums_in_registers: bool = True
    """Gradients of keys and values in 16 bits are summed up there (``kOutputInRF``), else in fp32 in memory."""


_SMALLEST, _ANY = BackwardTiles(64, 64, 64), 1 << 30
_WIDE = BackwardTiles(_ANY, 128, 64, sums_in_registers=False)
AMPERE_TILES = (_SMALLEST, BackwardTiles(128, 128, 128), _WIDE)
AMPERE_FP32_TILES = (_SMALLEST, BackwardTiles(_ANY, 128, 64))
SMALL_TILES = (
    _SMALLEST, BackwardTiles(96, 128, 64), BackwardTiles(128, 64, 64, sums_in_registers=False), _WIDE,
)  # fmt: skip
OLDER_TILES = (_SMALLEST, BackwardTiles(128, 128, 64), _WIDE)
FP32_TILES = (BackwardTiles(_ANY, 64, 64),)
"""Forms in the order in which they are tried (``dispatch_cutlassB``): the first that fits the card's shared memory.
Found by the workspaces that torch 2.13 asks for, on every generation of cards, at heads of 32 to 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaSupport:
    """What the kernels of one generation of cards take."""

    cudnn_head_dim: int = 0
    """Largest head that cuDNN's attention trains with, where it is preferred; 0: it is not."""
    flash: bool = False
    flash_dropout_head_dim: int = MAX_FLASH_HEAD_DIM
    """Largest head that flash trains with under dropout: less where shared memory is small."""
    efficient_bf16: bool = False
    """The memory-efficient kernel takes bf16."""
    half_multiple: int = 8
    """Heads of 16 bits must be a multiple of this for the memory-efficient kernel."""
    fp32_multiple: int = 4
    """The same in fp32."""
    efficient: bool = True
    """There is one."""
    efficient_dropout: bool = True
    """It trains under dropout, and with a mask that wants a gradient."""
    half_tiles: tuple[BackwardTiles, ...] = OLDER_TILES
    """Forms of its backward pass in 16 bits."""
    fp32_tiles: tuple[BackwardTiles, ...] = FP32_TILES

    def backward_tiles(self, dtype: DType, widest: int) -> BackwardTiles:
        """The form of the memory-efficient kernel's backward pass for heads of this width.

        >>> SDPA_SUPPORT[8, 6].backward_tiles(DType.BF16, 128).sums_in_registers
        False
        """
        tiles = self.half_tiles if dtype.is_half else self.fp32_tiles
        return next(each for each in tiles if widest <= each.widest)


_AMPERE = SdpaSupport(
    flash=True, efficient_bf16=True, half_tiles=AMPERE_TILES, fp32_tiles=AMPERE_FP32_TILES
)
_AMPERE_SMALL = SdpaSupport(
    flash=True, efficient_bf16=True, flash_dropout_head_dim=192, half_tiles=SMALL_TILES
)

SDPA_SUPPORT: dict[tuple[int, int], SdpaSupport] = {
    (8, 0): _AMPERE,
    (5, 0): SdpaSupport(half_multiple=1, fp32_multiple=1),
    (7, 0): SdpaSupport(fp32_multiple=1),
    (8, 6): _AMPERE_SMALL,
    (9, 0): replace(_AMPERE, cudnn_head_dim=256),
    (10, 0): replace(_AMPERE, cudnn_head_dim=128),
    (10, 3): _AMPERE,
    (12, 0): _AMPERE_SMALL,
}
"""By the oldest compute capability it holds for; the plainest that many cards share comes first.

cuDNN is preferred on 9.0 and 10.0 alone (``check_prefer_cudnn_attention``)."""

_BY_MANAGER = {
    MemoryManager.XPU: SdpaSupport(efficient_bf16=True, half_multiple=1, fp32_multiple=1, efficient_dropout=False),
    MemoryManager.NPU: SdpaSupport(flash=True, efficient_bf16=True),
    MemoryManager.HPU: SdpaSupport(efficient_bf16=True),
}  # fmt: skip
"""Of cards that are not CUDA's: oneDNN's kernel keeps a number a row as the efficient one does, and takes no grouped
heads where it trains (``mkldnn/xpu/Attention.cpp``, ``check_grad``); torch_npu's fused one and Habana's are taken to be like CUDA's.
Metal's has no backward pass and compilers have none: products of matrices, which are the high end too."""
_NONE = SdpaSupport(efficient=False)

DEFAULT_SUPPORT = _AMPERE
"""Of a card known by its memory alone, and where there is none."""


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """One call of the dispatcher: all that decides."""

    dtype: DType
    head_dim: int
    value_head_dim: int
    queries: int
    keys: int
    masked: bool
    """A mask is handed over; ``is_causal`` is none."""
    trained_mask: bool
    """The mask requires a gradient (T5's position bias)."""
    dropout: bool
    grouped: bool
    """Fewer key/value heads than query heads are left to the kernel."""
    spread: bool = False
    """One key/value head stands for all, and the call does not say so: a product spreads it, but no
    other kernel does (``check_batch_size_and_num_heads_dense``)."""


def sdpa_support(gpu: GpuSpec | None) -> SdpaSupport:
    """What a card's kernels take.

    Cards without CUDA's compute capability run flash where they have it (AMD's, through AOTriton).
    """
    if gpu is None:
        return DEFAULT_SUPPORT
    if not gpu.manager.is_replayed:
        return _BY_MANAGER.get(gpu.manager, _NONE)
    if gpu.compute_capability is None:
        return DEFAULT_SUPPORT
    known = [since for since in SDPA_SUPPORT if since <= gpu.compute_capability]
    return SDPA_SUPPORT[max(known)] if known else SdpaSupport(half_multiple=1, fp32_multiple=1)


def sdpa_way(call: SdpaCall, support: SdpaSupport) -> tuple[ScoreKernel, BackwardTiles | None]:
    """All that goes by the card: the kernel, and the form of its backward pass where it has several."""
    kernel = choose_sdpa_kernel(call, support)
    if kernel is not ScoreKernel.EFFICIENT:
        return kernel, None
    return kernel, support.backward_tiles(call.dtype, max(call.head_dim, call.value_head_dim))


def choose_sdpa_kernel(call: SdpaCall, support: SdpaSupport) -> ScoreKernel:
    """The first kernel in torch's order that takes the call.

    >>> call = SdpaCall(DType.BF16, 64, 64, 512, 512, True, False, False, False)
    >>> [choose_sdpa_kernel(call, SDPA_SUPPORT[card]).value for card in ((7, 0), (8, 0), (9, 0))]
    ['math', 'efficient', 'cudnn']
    """
    if call.spread:
        return ScoreKernel.MATH
    if _cudnn_takes(call, support):
        return ScoreKernel.CUDNN
    if _flash_takes(call, support):
        return ScoreKernel.FLASH
    if _efficient_takes(call, support):
        return ScoreKernel.EFFICIENT
    return ScoreKernel.MATH


def _cudnn_takes(call: SdpaCall, support: SdpaSupport) -> bool:
    heads = (call.head_dim, call.value_head_dim)
    return (
        support.cudnn_head_dim > 0
        and (max(heads) <= support.cudnn_head_dim or heads == LATENT_HEAD_DIMS)
        and call.dtype.is_half
        and not (call.dropout or call.trained_mask)
        and all(size % ALIGNED_HEAD_MULTIPLE == 0 for size in heads)
        and min(call.queries, call.keys) > 1
    )


def _flash_takes(call: SdpaCall, support: SdpaSupport) -> bool:
    most = support.flash_dropout_head_dim if call.dropout else MAX_FLASH_HEAD_DIM
    return (
        support.flash
        and call.dtype.is_half
        and not call.masked
        and call.head_dim == call.value_head_dim <= most
    )


def _efficient_takes(call: SdpaCall, support: SdpaSupport) -> bool:
    multiple = support.half_multiple if call.dtype.is_half else support.fp32_multiple
    return (
        support.efficient
        and (support.efficient_dropout or not (call.dropout or call.trained_mask))
        and not call.grouped
        and (call.dtype is not DType.BF16 or support.efficient_bf16)
        and call.head_dim % multiple == 0
        and call.value_head_dim % multiple == 0
    )
