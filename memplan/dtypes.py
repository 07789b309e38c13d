"""The number formats that tensors are held in, and their sizes."""

from enum import Enum


class DType(Enum):
    """A tensor's number format; the value is ``(name, bytes per element)``."""

    FP32 = ("fp32", 4)
    BF16 = ("bf16", 2)
    FP16 = ("fp16", 2)
    INT64 = ("int64", 8)
    INT32 = ("int32", 4)
    BOOL = ("bool", 1)
    UINT8 = ("uint8", 1)
    INT8 = ("int8", 1)
    FP8 = ("fp8", 1)
    """Codes of 8 bits or fewer, packed, with what scales them."""

    # Members are their own only equals, and tapes and walks look at them all the time.
    __hash__ = object.__hash__

    def __init__(self, label: str, num_bytes: int) -> None:
        self.label = label
        self.num_bytes = num_bytes
        """Bytes of one element."""
        self.is_half = label in ("bf16", "fp16")
        """Whether this is one of the two 16-bit floating formats."""
        self.is_floating = self.is_half or label == "fp32"
        """Whether a tensor of this format can need a gradient."""


def promote(left: DType, right: DType) -> DType:
    """Return the format of ``left + right``, as torch promotes tensors.

    >>> promote(DType.BF16, DType.FP32).label, promote(DType.BF16, DType.INT64).label
    ('fp32', 'bf16')
    """
    if left is right or (left.is_floating and not right.is_floating):
        return left
    return right if right.is_floating and not left.is_floating else DType.FP32
