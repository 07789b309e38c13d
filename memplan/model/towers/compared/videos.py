"""Clips compared with texts: messages between frames, and texts that have seen the clip (X-CLIP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation
    from memplan.model.towers.layers import LayerBody


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageLayerBody:
    """A layer in which each frame also sees a token that the frames made of one another's."""

    layer: LayerBody
    messages: LayerBody
    """How the frames' tokens attend; its first norm stands before them."""
    frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesBeginBody:
    """One vector of each frame becomes a sequence; positions are added, and go not past what follows."""

    size: int
    frames: int
    positions: str
    """The weight, as ``module.name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FramesEndBody:
    """What went past is added, and the frames' mean is the clip's vector."""

    frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenPatchesBody:
    """The patches of all frames, normed and multiplied by a weight, averaged over the frames."""

    size: int
    outputs: int
    frames: int
    norm: str
    weight: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsBeginBody:
    """All texts once more for each clip."""

    size: int
    norm: str
    """On what they will see of the clips."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLayerBody:
    """Texts see a clip's patches, and pass a network."""

    size: int
    num_heads: int
    activation: Activation
    attention_dropout: float = 0.0
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipContrastBody:
    """Each clip compared with the texts that have seen it."""

    width: int
    share: str
    """What of the prompts is added to the texts, as ``module.name``."""
    scale: str


VideoContrastBody = (
    MessageLayerBody
    | FramesBeginBody
    | FramesEndBody
    | SeenPatchesBody
    | PromptsBeginBody
    | PromptLayerBody
    | ClipContrastBody
)
