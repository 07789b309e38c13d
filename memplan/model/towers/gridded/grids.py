"""Transformers over pictures that stay a grid: what mixes the positions of a layer.

Norms, networks and sums around it are parts of their own (``memplan.model.towers.body``).
"""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedBody:
    """A variable of the model's holds what is given on from here, until ``ForgottenBody``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgottenBody:
    """The latest of those variables goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedBody:
    """The model returns what is given on from here beside its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBody:
    """A variable of the present frame holds what is given on until that returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBody:
    """A token before the patches, and a table of positions that is resized to the picture (PVT)."""

    size: int
    positions: str
    """The table, as ``module.name``."""
    token: str = ""
    """The token, as ``module.name``; empty: there is none."""
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBody:
    """A token before the patches."""

    size: int
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBody:
    """The token before the patches, cut off (CvT)."""

    size: int


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolvedAttentionBody:
    """Queries, keys and values each pass a depthwise convolution and a batch norm first (CvT)."""

    module: str
    size: int
    num_heads: int
    kernel: int
    query_stride: int
    query_padding: int
    """Rows that are added above and below together."""
    key_stride: int
    key_padding: int
    bias: bool
    has_token: bool
    """A token stands before the positions, which no convolution reads."""
    dropout: float
    output_dropout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedLinearBody:
    """A linear layer without a bias, and a batch norm (LeViT)."""

    module: str
    inputs: int
    outputs: int
    copies: bool = False
    """What it reads lies channel by channel, so that the product reads a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffsetAttentionBody:
    """Scores get a trained number for each distance, picked by index (LeViT)."""

    module: str
    size: int
    outputs: int
    num_heads: int
    key_size: int
    """Numbers of a query's head, and of a key's."""
    value_size: int
    stride: int = 0
    """Queries come from each so-manieth position down and across; 0: from all, by the same matrix."""
    copies: bool = False
    """As ``NormedLinearBody`` has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFactorsBody:
    """Each sample's numbers times one of its own in fp32 (LeViT's stochastic depth)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FocalBody:
    """Views of ever wider surroundings, each times a gate, added up; a query multiplies them (FocalNet)."""

    module: str
    size: int
    kernels: tuple[int, ...]
    normalized: bool
    """The sum is divided by how many there are."""
    normed: bool
    """A layer norm stands before the last matrix."""
    dropout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthwiseBody:
    """A convolution of each channel by itself, on rows of positions."""

    module: str
    kernel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledBody:
    """Times a weight, or a plain 1."""

    weight: str = ""
    """As ``module.name``."""


GridBody = (
    NamedBody
    | ForgottenBody
    | ReturnedBody
    | LocalBody
    | PlacedBody
    | TokenBody
    | FirstBody
    | UnfoldedBody
    | FoldedBody
    | ReducedAttentionBody
    | ConvolvedAttentionBody
    | NormedLinearBody
    | OffsetAttentionBody
    | SampleFactorsBody
    | FocalBody
    | DepthwiseBody
    | ScaledBody
)
