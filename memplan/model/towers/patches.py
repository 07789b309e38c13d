"""How pictures become tokens."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


class Positions(Enum):
    """Where the positions come from that are added to the patches."""

    NONE = "none"
    PARAMETER = "parameter"
    """One weight, added as it is (ViT)."""
    TABLE = "table"
    """Rows of a table, looked up by a buffer of numbers (CLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchesBody:
    """Pictures become tokens: a convolution whose stride is its kernel, other tokens, positions."""

    size: int
    """Width of a token."""
    channels: int
    image: tuple[int, int]
    """Height and width of a picture where the setup says nothing else [pixels]."""
    patch: tuple[int, int]
    projection: str
    """The convolution's module."""
    bias: bool = True
    tokens: tuple[str, ...] = ()
    """Weights that stand before the patches, as ``module.name``."""
    registers: str = ""
    """The weight that is put in behind the first token, without a position."""
    num_registers: int = 0
    positions: Positions = Positions.NONE
    position_module: str = ""
    """The table's module, or the weight as ``module.name``."""
    frames: int = 1
    """Pictures that one patch spans, the same one where there is no video (Qwen-VL)."""
    crops: int = 1
    """Crops that a picture comes in, each as large as ``image``."""
    masked: bool = False
    """All pictures lie in one row, told apart by a mask of every pair, and normed at once (Pixtral)."""
    rotary_dim: int = 0
    """Size of a head that the layers turn; 0: they do not."""
    windowed: bool = False
    """Patches are put in the order of windows (Qwen2.5-VL)."""
    resampled_rows: bool = False
    """Positions are mixed from four rows of the table for each patch (Qwen3-VL)."""
    casts_pictures: bool = True
    """The class itself casts pictures to the convolution's dtype."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReorderedBody:
    """Rows are put back in another order, a copy."""

    size: int


PictureBody = PatchesBody | ReorderedBody
