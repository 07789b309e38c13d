"""Where towers meet a language model."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


class Joining(Enum):
    """How what towers give reaches a language model."""

    SCATTERED = "scattered"
    """It is written over the embeddings of the tokens that stand for pictures (``masked_scatter``)."""
    CROSSED = "crossed"
    """Layers of the language model attend to it (Llama 3.2 Vision)."""
    UNSEEN = "unseen"
    """It does not: no picture is shown, and what is drawn comes as tokens (GLM-Image)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerJoin:
    """Where towers meet the language model."""

    joining: Joining
