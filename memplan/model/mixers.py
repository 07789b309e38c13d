"""What may stand where attention does, and parts that are only counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.latent import LatentAttentionSpec

if TYPE_CHECKING:
    from memplan.model.networks import Activation
    from memplan.model.norms import NormSpec
    from memplan.model.parameters import ParameterShape


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSpec:
    """A part of a layer whose weights are known, but whose operations are not written down."""

    parameters: tuple[ParameterShape, ...] = ()
    """None at all where the layer has no such part."""


NOTHING = CountedSpec()
"""A part that the layer does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolutionSpec:
    """LFM2's mixer: products around a short convolution over the tokens."""

    kernel_size: int
    bias: bool = False
    """The convolution and both linear layers have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningSpec:
    """MiniMax's linear attention: blocks of tokens, each with a share of all earlier ones."""

    num_heads: int
    head_dim: int
    block_size: int
    """Tokens of a block, which attend to each other as usual."""
    activation: Activation
    """Of queries, keys and values."""
    norm: NormSpec
    """On the output, before its gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRuleSpec:
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Of the convolution that queries, keys and values pass."""
    activation: Activation
    """Behind that convolution."""
    fused: bool
    """Two linear layers make everything, rather than four (Qwen3-Next)."""


OtherMixer = ShortConvolutionSpec | LightningSpec | DeltaRuleSpec | CountedSpec
"""What mixes tokens without attention's scores."""


TokenMixer = AttentionSpec | LatentAttentionSpec | OtherMixer
"""What can mix the tokens of a layer."""
