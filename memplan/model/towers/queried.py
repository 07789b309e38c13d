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


QueriedBody = MaskedQueriesBody
