"""A layer of a tower: attention and a feed-forward network."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.towers.parts import LAYER_NORM

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.networks import Activation
    from memplan.model.norms import NormSpec


class Turning(Enum):
    """How a layer turns its heads by the tables that the tower's first block made."""

    NONE = "none"
    PLAIN = "plain"
    """In the dtype that they have (Pixtral)."""
    FULL = "full"
    """In fp32, cast back (Qwen-VL)."""
    AXES = "axes"
    """Each half of a head by an axis of its own (Gemma 4)."""
    IN_PART = "in_part"
    """As the attention's own form says (GLM-ASR)."""
    COMPLEX = "complex"
    """As complex numbers in fp32, cast back (Llama 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """What the modules of a tower's layer are called."""

    attention: str = "self_attn"
    output: str = "out_proj"
    first_norm: str = "layer_norm1"
    second_norm: str = "layer_norm2"
    network: str = "mlp"
    up: str = "fc1"
    down: str = "fc2"
    gate: str = ""
    """The third matrix of a gated network; without one it has none."""
    first_post_norm: str = ""
    """A norm on what attention gives, before the sum."""
    second_post_norm: str = ""
    first_scale: str = ""
    """A weight that multiplies what attention adds, as ``module.name``."""
    second_scale: str = ""
    fused: str = ""
    """Queries, keys and values as one matrix."""
    cross_attention: str = "cross_attn"
    cross_norm: str = "cross_attn_layer_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBody:
    """A layer of a tower: attention and a feed-forward network, each with a norm and a sum."""

    size: int
    inner_size: int
    attention: AttentionSpec
    activation: Activation
    norm: NormSpec = LAYER_NORM
    bias: bool = True
    """Of the feed-forward network."""
    cross_attention: AttentionSpec | None = None
    """A decoder's, to what another tower gives."""
    memory: str = ""
    """That tower, by the name that its blocks begin with."""
    head_norm: int = 0
    """Numbers under a norm on queries and one on keys; 0: none."""
    head_norm_kind: NormSpec | None = None
    """That norm, where it is not of the layer's own kind."""
    value_norm: bool = False
    """Values pass such a norm too, one without a weight (Gemma 4)."""
    clipped: bool = False
    """What each matrix reads and gives is clamped between buffers (Gemma 4's small sizes)."""
    masked: bool = False
    """Padding is told apart by the mask that the first block made."""
    turning: Turning = Turning.NONE
    one_row: bool = False
    """All pictures lie in one row, told apart by the mask that the first block made (Pixtral)."""
    copies_heads: bool = False
    """Queries are scaled at once, and all three copied to lie head by head (Whisper)."""
    cuts_together: bool = False
    """Queries, keys and values are cut into heads once all three are there (``CLIPAttention``)."""
    selected: bool = False
    """Queries, keys and values are picked out of one tensor by index, not cut (InstructBLIP)."""
    across: bool = False
    """Norms leave tokens lying across, as a convolution gave them, so that each matrix copies what it reads."""
    dropout: float = 0.0
    """Probability on what attention and network return."""
    activation_dropout: float = 0.0
    drop_path: bool = False
    """Whole samples' sums are dropped: what is added is divided and multiplied by one number each."""
    gated: bool = False
    """Scales are numbers whose tanh multiplies (Llama 3.2 Vision)."""
    recomputed: bool = True
    """Checkpointing reaches it: the class is one of those that can compute their activations anew."""
    names: LayerNames = LayerNames()
