"""What Segment Anything computes: layers in windows, a neck, prompts, and a decoder of masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.networks import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedLayerBody:
    """A layer whose scores get numbers of distances down and across (``SamVisionLayer``)."""

    size: int
    inner_size: int
    num_heads: int
    window: int
    """Side of the windows that see themselves alone; 0: a picture does."""
    relative: bool
    bias: bool
    dropout: float
    activation: Activation
    written_out: bool = False
    """The class has no kernel for its scores, whatever is asked for (GOT-OCR 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskNeckBody:
    """Two convolutions, each with a norm over the channels (``SamVisionNeck``)."""

    size: int
    outputs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacesBody:
    """Where each patch is, through a trained matrix; it is made before all else."""

    image: tuple[int, int]
    patch: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBody:
    """One point or box a picture, beside the tokens that masks are read from; no mask is given."""

    size: int
    num_tokens: int
    last_token: str = ""
    """The weight of one token more, behind the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineFeaturesBody:
    """What the encoder gave, and what its first layer over whole pictures did, widened fourfold (SAM-HQ)."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoWayLayerBody:
    """Tokens see the picture, and the picture the tokens (``SamTwoWayAttentionBlock``)."""

    size: int
    narrow: int
    """Width at which one sees the other."""
    inner_size: int
    num_heads: int
    network: str
    activation: Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class LastLookBody:
    """Tokens see the picture once more."""

    size: int
    narrow: int
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpscalingBody:
    """The picture is widened fourfold."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MasksBody:
    """A small network on each token, and its product with the picture."""

    size: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FineMasksBody:
    """The same, and one token's mask on finer features, added to the others in order of merit (SAM-HQ)."""

    size: int
    num_tokens: int
    """But for that one."""


SegmentingBody = (
    WindowedLayerBody
    | MaskNeckBody
    | PromptBody
    | TwoWayLayerBody
    | LastLookBody
    | UpscalingBody
    | MasksBody
    | FineFeaturesBody
    | FineMasksBody
)
