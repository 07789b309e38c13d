"""What may stand where attention does, and parts that are only counted."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.model.attention import (
    AttentionSpec,
    BlockSparseSpec,
    SlidingChunksSpec,
)
from memplan.model.compressed import CompressedAttentionSpec
from memplan.model.latent import LatentAttentionSpec
from memplan.model.mixtures import (
    BesideDenseSpec,
    EveryTokenSpec,
)
from memplan.model.shared_keys import SharedKeysSpec

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelDecaySpec:
    """Linear attention by the delta rule with a decay for each channel (Kimi Linear)."""

    num_heads: int
    head_dim: int
    """Of queries, keys and values, and what decays and gate are projected from."""
    kernel_size: int
    """Of the convolution that queries, keys and values pass."""
    activation: Activation
    """Behind that convolution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSpec:
    """Mamba's first mixer: a scan over the tokens, with decays of its own for each channel."""

    inner: int
    state: int
    rank: int
    """Width that time steps are projected from."""
    kernel: int
    """Of the convolution that everything but the gate passes."""
    activation: Activation
    """Behind the convolution."""
    bias: bool
    convolution_bias: bool
    norm: NormSpec | None = None
    """On the parameters of the scan (Falcon-Mamba, Jamba)."""

    @property
    def is_one_function(self) -> bool:
        """Whether the package has one function for all of the mixer: not with norms that own weights."""
        return self.norm is None or not self.norm.weight

    @property
    def scans(self) -> bool:
        """Whether its kernel is a choice of its own."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaHeadsSpec:
    """Mamba's first mixer in heads, each with parameters and a scan of its own (Zamba)."""

    head: MambaSpec
    """One of them."""
    num_heads: int

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head.inner

    @property
    def scans(self) -> bool:
        """Whether its kernel is a choice of its own."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeMixingSpec:
    """RWKV's: a running average of all earlier values, by keys that fade."""

    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedRecurrenceSpec:
    """Griffin's recurrent block: a convolution and a gated recurrence of every channel, times a branch
    beside it (RecurrentGemma)."""

    width: int
    num_heads: int
    """Blocks of the gates' weights."""
    kernel: int
    """Of the convolution."""
    activation: Activation
    """Of the branch beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelMixingSpec:
    """RWKV's network: a squared ReLU, and a receptance that its output is multiplied by."""

    intermediate_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAttentionSpec:
    """Attention to what towers gave, with norms on queries and keys (Llama 3.2 Vision)."""

    scores: AttentionSpec
    norm: NormSpec


class GatedNorm(Enum):
    """How a gate and a norm follow each other behind Mamba's second scan."""

    FIRST = "first"
    """The gate, then the norm."""
    LAST = "last"
    """The norm, then the gate (an option of Falcon-H1)."""
    NONE = "none"
    """The gate alone (another one)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Spec:
    """Mamba's second mixer: a scan in chunks, with one decay for each head."""

    inner: int
    """Width of all heads together."""
    heads: int
    groups: int
    """Of heads that share keys and queries, and of what a norm normalizes at once."""
    state: int
    kernel: int
    """Of the convolution that everything but gate and step passes."""
    chunk: int
    """Tokens that are paired as attention pairs them."""
    activation: Activation
    """Behind the convolution."""
    bias: bool
    output_bias: bool
    convolution_bias: bool
    gate: GatedNorm = GatedNorm.FIRST
    scaled: bool = False
    """Constants multiply what is projected, before and after (Falcon-H1)."""

    @property
    def scans(self) -> bool:
        """Whether its kernel is a choice of its own."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySideSpec:
    """Attention and a mixer on one input, each multiplied by a constant and added (Falcon-H1)."""

    mixer: Mamba2Spec
    scores: AttentionSpec
    """The attention."""

    @property
    def scans(self) -> bool:
        """Whether its kernel is a choice of its own."""
        return True


OtherMixer = (
    ShortConvolutionSpec
    | LightningSpec
    | DeltaRuleSpec
    | ChannelDecaySpec
    | MambaSpec
    | MambaHeadsSpec
    | Mamba2Spec
    | SideBySideSpec
    | TimeMixingSpec
    | GatedRecurrenceSpec
    | SlidingChunksSpec
    | BlockSparseSpec
    | SharedKeysSpec
    | MemoryAttentionSpec
    | CompressedAttentionSpec
    | CountedSpec
)
"""What mixes tokens without attention's scores."""


WITH_SCORES = (
    SideBySideSpec,
    SharedKeysSpec,
    CompressedAttentionSpec,
)
"""Those that have an attention of their own, ``scores``."""


OtherNetwork = ChannelMixingSpec | EveryTokenSpec | BesideDenseSpec | CountedSpec
"""A feed-forward network of another kind."""


TokenMixer = AttentionSpec | LatentAttentionSpec | OtherMixer
"""What can mix the tokens of a layer."""
