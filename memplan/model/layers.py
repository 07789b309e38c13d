"""Layers, embeddings and the stacks they form, as data."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.attention import AttentionSpec
    from memplan.model.mixers import AbsentSpec, TokenMixer
    from memplan.model.mixtures import MixtureSpec
    from memplan.model.networks import FeedForwardSpec
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer of a stack."""

    attention: TokenMixer
    """What mixes the tokens."""
    feed_forward: FeedForwardSpec | MixtureSpec | AbsentSpec
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """A number of equal layers that follow one another."""

    count: int
    layer: LayerSpec
    shared: bool = False
    """All of them are one layer's parameters (ALBERT)."""


NUM_REGIONS = 36
"""Regions of each picture that a detector gives: the fixed number of the features that LXMERT was trained
with (arXiv:1908.07490, section 4.1: 36 objects); no config says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """How token ids become hidden states."""

    embedding_size: int
    """Width of the token table; differs from the hidden size where a projection follows."""
    num_positions: int = 0
    """Rows of a learned position table, offset included; 0 for none."""
    extra_rows: int = 0
    """Rows of the token table beside the vocabulary's (mllama's images)."""
    num_regions: int = 0
    """Of a picture, beside the tokens (VisualBERT, LXMERT)."""
    steps: bool = False
    """There are no tokens, but steps of a trajectory (Decision Transformer)."""
    own_module: bool = False
    """A module of its own makes the sum, so that only its result outlives it (BERT)."""
    norm: NormSpec | None = None
    dropout: float = 0.0
    patch_features: int = 0
    """Inputs of a linear layer for image patches, which a batch of text leaves unused (Fuyu)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """An encoder or a decoder."""

    name: str
    """``decoder`` or ``encoder``."""
    runs: tuple[LayerRun, ...]
    embedding: EmbeddingSpec | None
    """None where the stack shares the other one's embedding entirely (T5's decoder)."""
    final_norm: NormSpec | None
    projected_out: bool = False
    """The result is projected back to the width of the token table (OPT-350m)."""
    several_streams: bool = False
    """The residual stream is several, which are one again before the final norm (DeepSeek-V4)."""

    @property
    def num_layers(self) -> int:
        """Layers in all runs."""
        return sum(run.count for run in self.runs)
