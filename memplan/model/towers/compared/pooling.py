"""One vector of each picture, text or clip, and its classes."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


class TowerPooling(Enum):
    """What becomes of all tokens of a picture or a text."""

    FIRST = "first"
    """The first one's vector."""
    LAST = "last"
    """A text's last one's (SigLIP)."""
    FOUND = "found"
    """A text's end-of-sequence token's, looked for in the ids (CLIP)."""
    MEAN = "mean"
    """The mean of all."""
    PATCHES_MEAN = "patches_mean"
    """The mean of all but the first (CLIP's classifier)."""
    FIRST_AND_MEAN = "first_and_mean"
    """Both, side by side (DINOv2's classifier)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerBody:
    """One vector of each picture or text."""

    pooling: TowerPooling
    size: int
    norm: str = ""
    """The module of a norm on it, before all else."""
    linear: str = ""
    """The module of a linear layer on it."""
    outputs: int = 0
    """Width behind that layer."""
    bias: bool = True
    activation: Activation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPoolerBody:
    """A trained query attends over all tokens, and a network follows (SigLIP)."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierBody:
    """Classes of each picture or clip, and their loss."""

    modules: tuple[tuple[str, int, int], ...]
    """Linear layers on the same vector, each with its inputs and its classes; their logits are averaged."""
    pooling: TowerPooling | None = None
    """None: the vector is there already."""
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SquaresBody:
    """Patches averaged in squares by a matrix of shares in fp32; rows of padding are left out (Gemma 4)."""

    size: int
    side: int
    """Patches along a side of a square."""
    tokens: int
    """What a picture gives."""
    standardized: bool = False
    """Moved and scaled by two buffers."""


PoolingBody = SquaresBody | PoolerBody | AttentionPoolerBody | ClassifierBody
