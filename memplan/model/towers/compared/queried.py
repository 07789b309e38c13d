"""Trained queries that read a tower's tokens on their way to a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedQueriesBody:
    """So many queries for so many patches read them by ``torch.nn.MultiheadAttention`` with a mask (Aria)."""

    size: int
    outputs: int
    num_heads: int
    counts: tuple[tuple[int, int], ...]
    """Patches of a picture, and the queries that read them."""
    query: str
    """The weight, as ``module.name``."""
    module: str
    """What the attention is in."""
    norm: str
    """The module of the norm on what it gives."""
    network: str
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionBody:
    """Queries once for each picture, a text's tokens behind them; a norm on both (InstructBLIP)."""

    queries: str
    """The weight, as ``module.name``."""
    size: int
    num_queries: int
    num_positions: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryLayerBody:
    """BERT's layer, in which queries may see a tower's tokens and pass a network of their own."""

    size: int
    inner_size: int
    num_heads: int
    num_queries: int
    source: int
    """Width of what queries see; 0: they see nothing here."""
    memory: str
    """The tower, by the name that its blocks begin with."""
    activation: Activation
    dropout: float = 0.0
    attention_dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueriesOnlyBody:
    """Without the text."""

    size: int
    num_queries: int


QueriedBody = MaskedQueriesBody | InstructionBody | QueryLayerBody | QueriesOnlyBody
