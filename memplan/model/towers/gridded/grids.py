"""Transformers over pictures that stay a grid: what mixes the positions of a layer.

Norms, networks and sums around it are parts of their own (``memplan.model.towers.body``).
"""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgottenBody:
    """The latest thing that a variable of the model's holds goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedBody:
    """The model returns what is given on from here beside its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedAttentionBody:
    """Keys and values come from a picture made smaller by a convolution (PVT, SegFormer)."""

    module: str
    size: int
    num_heads: int
    reduction: int
    """How many times smaller its sides are; 1: they stay."""
    bias: bool
    dropout: float
    output_dropout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfoldedBody:
    """Positions at the same place in squares of a side become sequences of their own (MobileViT)."""

    size: int
    side: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedBody:
    """Those sequences become a picture again."""

    size: int
    side: int


GridBody = ForgottenBody | ReturnedBody | UnfoldedBody | FoldedBody | ReducedAttentionBody
