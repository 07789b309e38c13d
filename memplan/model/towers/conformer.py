"""A Conformer's layers: half a network, attention, convolutions along time, the other half."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


class Distances(Enum):
    """How a layer's attention knows where its tokens are."""

    NONE = "none"
    SINES = "relative"
    """Scores get queries times sines of every distance, through a matrix of the layer's own."""
    TABLE = "relative_key"
    """Scores get queries times rows of a table, looked up for every pair."""
    ROTARY = "rotary"
    """What queries and keys are made from is turned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceTablesBody:
    """Before the layers: dropout, and what all of them read of positions."""

    size: int
    head_dim: int
    distances: Distances
    positions: int
    """For how many positions sines are there at first."""
    dropout: float = 0.0
    chunked: bool = False
    """A mask of chunks is made, be there one chunk alone."""
    before: str = ""
    """The module behind theirs, where that is not the next one that runs (``embed_positions``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformerLayerBody:
    """``Wav2Vec2ConformerEncoderLayer`` and its kin."""

    size: int
    inner_size: int
    num_heads: int
    activation: Activation
    distances: Distances
    kernel: int
    causal: bool = False
    """Convolutions see what was before alone: a copy with zeros in front, and a layer norm."""
    names_distances: bool = False
    """Attention's own variables hold distances and their products until it returns (Seamless M4T v2)."""
    dropout: float = 0.0
    """On what the networks return."""
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    """On weights, and on what attention returns."""
    convolution_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentiveAdapterBody:
    """Frames are made fewer twice, once for what attends and once for what goes past it."""

    size: int
    inner_size: int
    num_heads: int
    kernel: int
    stride: int
    activation: Activation
    dropout: float = 0.0
    """On what the network returns."""
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    """On weights."""
    result_dropout: float = 0.0
    """On what attention returns."""
    recomputed: bool = False
    """Checkpointing does not reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfNetworkBody:
    """Half of what a network gives is added (``intermediate_ffn``)."""

    module: str
    size: int
    inner_size: int
    activation: Activation
    dropout: float = 0.0
    activation_dropout: float = 0.0


ConformerBody = DistanceTablesBody | ConformerLayerBody | AttentiveAdapterBody | HalfNetworkBody
