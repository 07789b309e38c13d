"""Pictures compared with texts."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


class Contrast(Enum):
    """How pictures are compared with texts."""

    SOFTMAX = "softmax"
    """Cross-entropies of rows and columns (CLIP)."""
    SIGMOID = "sigmoid"
    """A log-sigmoid of each pair (SigLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastBody:
    """Pictures compared with texts: projections, norms, products, the loss."""

    kind: Contrast
    image: str
    """The tower of pictures, by the name that its blocks begin with."""
    text: str
    image_size: int
    text_size: int
    width: int
    image_projection: str = ""
    text_projection: str = ""
    scale: str = "model.logit_scale"
    divides: bool = False
    """The products are divided by it, not multiplied by its exponential (ALIGN)."""
    shift: str = ""
