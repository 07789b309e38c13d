"""How pictures become tokens."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


class Cut(Enum):
    """How a picture becomes patches."""

    CONVOLVED = "convolved"
    """A convolution whose stride is its kernel."""
    UNFOLDED = "unfolded"
    """Patches are copied out of the picture, and a linear layer reads them (Llama 4)."""
    FLAT = "flat"
    """The batch brings them cut out, and a linear layer reads them (SigLIP 2)."""


class Positions(Enum):
    """Where the positions come from that are added to the patches."""

    NONE = "none"
    PARAMETER = "parameter"
    """One weight, added as it is (ViT)."""
    TABLE = "table"
    """Rows of a table, looked up by a buffer of numbers (CLIP)."""
    AXES = "axes"
    """A row of a table for each axis, added up, and nothing for padding (Gemma 4)."""


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
    """The module that makes a vector of a patch."""
    cut: Cut = Cut.CONVOLVED
    bias: bool = True
    tokens: tuple[str, ...] = ()
    """Weights that stand before the patches, as ``module.name``."""
    tokens_last: bool = False
    """They stand behind them."""
    first_norm: str = ""
    """The module of a norm on patches before they have a position."""
    picked: bool = False
    """Pictures are picked out of the batch by index, a copy: what pads a sample is left out."""
    positions: Positions = Positions.NONE
    position_module: str = ""
    """The table's module, or the weight as ``module.name``."""
    rows: int = 0
    """Patches that a picture is padded to with a mask, whatever its size was: it is resized before."""
    centred: bool = False
    """The class itself moves colours from 0 to 1 to where -1 is black."""
    crops: int = 1
    """Crops that a picture comes in, each as large as ``image``."""
    masked: bool = False
    """All pictures lie in one row, told apart by a mask of every pair, and normed at once (Pixtral)."""
    rotary_dim: int = 0
    """Size of a head that the layers turn; 0: they do not."""
    one_table: bool = False
    """Cosines and sines are of one picture's places, and all pictures are turned by them (Step 3.7)."""
    resized: bool = False
    """A picture is resized to ``image`` before, whatever its size was, or refused."""
    by_channel: bool = False
    """They stay as the convolution laid them, channel by channel: nothing is joined to them (SigLIP)."""
    names_patches: bool = False
    """What the convolution gave has a name until the embedding returns (``CLIPVisionEmbeddings``)."""
    casts_pictures: bool = True
    """The class itself casts pictures to the convolution's dtype."""
    dropout: float = 0.0
