"""Pictures in tiles that a language model attends to (Llama 3.2 Vision)."""

from __future__ import annotations

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TilesBody:
    """Tiles become tokens, which know their place in a tile and their tile's in the picture.

    All tiles of a picture see one another; each is padded to a multiple of tokens with a mask.
    """

    size: int
    """Width of a token."""
    channels: int
    image: tuple[int, int]
    """Height and width of a tile [pixels]."""
    patch: tuple[int, int]
    crops: int
    """Tiles that every picture is padded to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePlacesBody:
    """Each tile's place in its picture, times a gate, is added to all its tokens."""

    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersJoinedBody:
    """What the tower gives and what some of its layers gave, side by side, without padding."""

    size: int
    layers: tuple[int, ...]
    """Which ones, from 0, or from the last as negative numbers."""


TileBody = TilePlacesBody | LayersJoinedBody
