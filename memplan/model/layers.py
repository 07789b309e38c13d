"""Layers, embeddings and the stacks they form, as data."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.compressed import StreamsSpec
    from memplan.model.funnel import FunnelSpec
    from memplan.model.mixers import OtherNetwork, TokenMixer
    from memplan.model.mixtures import MixtureSpec
    from memplan.model.networks import Activation, FeedForwardSpec
    from memplan.model.norms import NormSpec


class NormPlacement(Enum):
    """Where a layer's norms stand."""

    PRE = "pre"
    """Before attention and before the feed-forward network (GPT-2, Llama)."""
    POST = "post"
    """After each residual sum (BERT)."""
    SANDWICH = "sandwich"
    """Before and after both (Gemma 2)."""
    OUTPUT = "output"
    """Only on the outputs, before the residual sum (OLMo 2)."""
    PARALLEL = "parallel"
    """Attention and feed-forward read the same input, each through its own norm (GPT-NeoX)."""
    PARALLEL_SHARED = "parallel_shared"
    """Attention and feed-forward read one normalized input (Phi, Cohere)."""
    SINGLE = "single"
    """Before the layer's only part, attention or feed-forward (Mamba, Nemotron-H)."""
    NONE = "none"
    """The parts count norms of their own."""
    CROSSING = "crossing"
    """Before both, which read what towers gave, and are multiplied by a gate (Llama 3.2 Vision)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnVectorSpec:
    """How a layer's own vector of each token enters: times a gate, projected, normed, added."""

    width: int
    activation: Activation
    """Of the gate, which is made from the hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer of a stack."""

    attention: TokenMixer
    """What mixes the tokens."""
    feed_forward: FeedForwardSpec | MixtureSpec | OtherNetwork
    norm: NormSpec
    placement: NormPlacement = NormPlacement.PRE
    cross_attention: AttentionSpec | None = None
    dropout: float = 0.0
    """Probability on the outputs of attention and of the feed-forward network."""
    attention_dropout_only: bool = False
    """The feed-forward network's output is left out (ALBERT, XLM-RoBERTa-XL)."""
    feed_forward_dropout_only: bool = False
    """The attention's output is left out (DistilBERT)."""

    @property
    def attention_output_dropout(self) -> float:
        """Probability on the output of attention."""
        return 0.0 if self.feed_forward_dropout_only else self.dropout

    @property
    def feed_forward_output_dropout(self) -> float:
        """Probability on the output of the feed-forward network."""
        return 0.0 if self.attention_dropout_only else self.dropout

    dropout_modules: bool = False
    """Its dropouts are modules, on which ZeRO-3 hangs hooks, not calls of a function."""
    dropout_inside: bool = False
    """Dropout belongs to each sublayer's own module, which holds its input until then (GPT-2)."""
    streams: StreamsSpec | None = None
    """Each part stands between a sum and a mixture of residual streams (DeepSeek-V4)."""
    own_vector: OwnVectorSpec | None = None
    """The layer has a vector of its own for each token, which enters last (Gemma 4)."""
    buffer_scaled: bool = False
    """What it returns is multiplied in place by a buffer (Gemma 4)."""
    names_attended: bool = False
    """A variable of the layer holds what attention returned until the layer ends (GPT-2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """A number of equal layers that follow one another."""

    count: int
    layer: LayerSpec
    shared: bool = False
    """All of them are one layer's parameters (ALBERT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerVectorsSpec:
    """A second token table, with a vector for every layer; the embeddings, projected, are added."""

    num_rows: int
    num_layers: int
    width: int
    """Of one layer's vector."""
    norm: NormSpec
    """On each of the projected ones."""


NUM_REGIONS = 36
"""Regions of each picture that a detector gives: the fixed number of the features that LXMERT was trained
with (arXiv:1908.07490, section 4.1: 36 objects); no config says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionsSpec:
    """Features of a picture's regions, projected and put behind the tokens (VisualBERT)."""

    num_features: int
    num_positions: int = 0
    num_types: int = 0
    count: int = NUM_REGIONS


TOKENS_PER_STEP = 3
"""A return, a state and an action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectorySpec:
    """Returns, states and actions in the place of tokens (Decision Transformer)."""

    state: int
    action: int
    """Numbers of a state and of an action."""
    num_steps: int
    """Rows of the table of steps."""
    squashed: bool
    """Predicted actions pass through a tanh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """How token ids become hidden states."""

    embedding_size: int
    """Width of the token table; differs from the hidden size where a projection follows."""
    num_positions: int = 0
    """Rows of a learned position table, offset included; 0 for none."""
    extra_rows: int = 0
    """Rows of the token table beside the vocabulary's (mllama's images)."""
    num_token_types: int = 0
    steps: bool = False
    """There are no tokens, but steps of a trajectory (Decision Transformer)."""
    trajectory: TrajectorySpec | None = None
    """There are no tokens, but steps of a trajectory (Decision Transformer)."""
    regions: RegionsSpec | None = None
    """A picture's regions stand behind the tokens (VisualBERT)."""
    positions_in_place: bool = False
    """Positions are added in place (VisualBERT)."""
    own_module: bool = False
    """A module of its own makes the sum, so that only its result outlives it (BERT)."""
    norm: NormSpec | None = None
    norm_in_table: bool = False
    """The token table norms what it looks up (Muse Glimmer)."""
    dropout: float = 0.0
    dropout_module: bool = False
    """Dropout is a module, not a call of a function."""
    scaled: bool = False
    """The embeddings are multiplied by a constant (Gemma)."""
    patch_features: int = 0
    """Inputs of a linear layer for image patches, which a batch of text leaves unused (Fuyu)."""
    layer_vectors: LayerVectorsSpec | None = None
    """Each layer has a vector of its own for each token (Gemma 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossedSpec:
    """A stream of a picture's regions, with layers of its own, and layers in which it and the text read
    each other; all are as wide as the text's (LXMERT)."""

    regions: RegionsSpec
    num_sides: int
    """Numbers of a region's box."""
    region_layers: int
    crossed_layers: int
    read_in_the_end: bool
    """A loss reads what the regions have become."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """An encoder or a decoder."""

    name: str
    """``decoder`` or ``encoder``."""
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None
    """None where the stack shares the other one's embedding entirely (T5's decoder)."""
    final_norm: NormSpec | None
    funnel: FunnelSpec | None = None
    """Its layers run on fewer tokens, block by block; then its runs only say what one is like (Funnel)."""
    crossed: CrossedSpec | None = None
    """What comes behind its layers, of another stream too (LXMERT)."""
    projected_out: bool = False
    """The result is projected back to the width of the token table (OPT-350m)."""
    mixed_masks: bool = False
    """The class makes the full causal mask even where every layer has a window (Qwen2, Gemma 2)."""
    block_masks: bool = False
    """Tokens of a picture see one another: masks of every pair for every sequence (Gemma 3's towers)."""
    window_block_masks: bool = False
    """The same within windows alone; whole attention stays causal (Gemma 4)."""
    chunked_mask: bool = False
    """A window is a chunk that tokens attend within; its mask is made for every sequence (Llama 4)."""
    streams: StreamsSpec | None = None
    """The residual stream is several, which are one again before the final norm (DeepSeek-V4)."""
    several_streams: bool = False
    """The residual stream is several, which are one again before the final norm (DeepSeek-V4)."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own (Gemma 3)."""

    @property
    def num_layers(self) -> int:
        """Layers in all runs."""
        return sum(run.count for run in self.runs)
