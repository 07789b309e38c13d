"""Attention, as data: heads, projections, positions, gates."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.model.norms import NormSpec


class Projection(Enum):
    """How queries, keys and values come out of the hidden states."""

    SEPARATE = "separate"
    """Three linear layers."""
    FUSED_SPLIT = "fused_split"
    """One linear layer whose output is split into q, k and v, each contiguous in the columns."""
    FUSED_SLICED = "fused_sliced"
    """One linear layer, out of which q, k and v are sliced one by one (Phi-3)."""
    FUSED_INTERLEAVED = "fused_interleaved"
    """One linear layer whose output is viewed per head, then split (GPT-NeoX)."""
    FUSED_SELECTED = "fused_selected"
    """One linear layer whose output is viewed per head, each third indexed out (BLOOM)."""
    FUSED_COPIED = "fused_copied"
    """One linear layer whose output is split in blocks of heads, which are copied (CodeGen)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """Rotary position embeddings."""

    dim: int
    """Dimensions of each head that are rotated; the rest pass through."""
    upcast: bool = False
    """Queries and keys are rotated in fp32 and cast back (ESM, Cohere)."""
    expanded_tables: bool = False
    """Every layer repeats each number of the tables for itself (GLM, Helium)."""
    sections: bool = False
    """The tables are of time, height and width, for each sequence of its own (Qwen3.5)."""
    repeated: bool = False
    """The last dimensions of each head are turned, by tables of half as many, repeated in each call
    (DeepSeek-V4)."""
    complex_numbers: bool = False
    """Pairs are multiplied as complex numbers in fp32 (DeepSeek-V2)."""
    joined: bool = False
    """Heads are joined from a rotated part and the rest even where nothing rests (Phi-3)."""
    names_parts: bool = False
    """The attention module's own variables hold both parts until it returns (Phi)."""


class AttentionForm(Enum):
    """Who computes the scores: transformers' shared functions, or the class in steps of its own."""

    INTERFACE = "interface"
    """``ALL_ATTENTION_FUNCTIONS``: eager, sdpa or flash, as asked for."""
    OWN = "own"
    """As its class says (``memplan.classes``)."""
    PLAIN_SCORES = "plain_scores"
    """Divided, then masked; the softmax in their own dtype (VisualBERT)."""


class QueryScaling(Enum):
    """Where a class multiplies its queries by the scale, if not the scores."""

    IN_SCORES = "in_scores"
    """The attention kernel does."""
    NORMED = "normed"
    """As soon as they are normed, before the keys are (Muse Glimmer)."""


class OutputGate(Enum):
    """What attention's output is multiplied by, before the output projection."""

    NONE = "none"
    SIGMOID = "sigmoid"
    """Of a linear layer that runs with the queries' (AFMoE)."""
    SIGMOID_PER_HEAD = "sigmoid_per_head"
    """The same, one number for each head (Step 3.7)."""
    SIGMOID_BEHIND = "sigmoid_behind"
    """Of a linear layer that runs after attention (Muse Glimmer)."""
    SOFTPLUS = "softplus"
    """In fp32, of a linear layer that runs after attention (Laguna)."""
    SOFTPLUS_PER_HEAD = "softplus_per_head"
    """One number for each head (Laguna)."""
    QUERIES = "queries"
    """Sigmoid, of the other half of what the queries' projection gives (Qwen3-Next)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Multi-head or grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head; ``num_heads * head_dim`` need not equal the hidden size."""
    value_head_dim: int | None = None
    """Size of a value's head, where it differs from the queries' and keys'."""
    projection: Projection = Projection.SEPARATE
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    rotary: RotarySpec | None = None
    query_key_norm: NormSpec | None = None
    """A norm on queries and keys (Qwen3, OLMo 2)."""
    query_key_norm_per_head: bool = True
    """The norm runs over each head's dimensions rather than over all of them at once."""
    query_key_norm_weight_per_head: bool = False
    """Each head has a norm weight of its own (Cohere)."""
    query_key_norm_at_once: bool = False
    """Each is normed as soon as it is projected, queries before keys are projected (Qwen3, OLMo 2)."""
    query_key_norm_last: bool = False
    """The norm comes after the rotary embedding (Hunyuan)."""
    query_scaled_by_position: bool = False
    """Rotated queries are multiplied by a factor of their position (Ministral 3)."""
    position_factors_upcast: bool = False
    """That factor is fp32, and what it gives is cast back (Llama 4)."""
    fills_cache: bool = False
    """A key/value cache is filled in training too, unless layers are checkpointed (Fuyu)."""
    projection_clamped: bool = False
    """Queries, keys and values are clamped in place (OLMo's ``clip_qkv``)."""
    output_gate: OutputGate = OutputGate.NONE
    inner_norm: NormSpec | None = None
    """A norm on the heads' output, before the output projection (BitNet)."""
    own_eager: bool = False
    """The class's eager attention subtracts the largest score first (gpt-oss, MiMo-V2)."""
    sinks: bool = False
    """A learned score of each head joins the softmax as one more key; with ``own_eager``."""
    form: AttentionForm = AttentionForm.INTERFACE
    output_apart: bool = False
    """The output projection has a module of its own, before which queries, keys and values die
    (``BertSelfOutput``)."""
    query_viewed_last: bool = False
    """Keys and values are seen as heads before queries are (GPT-2)."""
    query_scaling: QueryScaling = QueryScaling.IN_SCORES
    weights_like_values: bool = False
    """Without an fp32 softmax, its result is still cast to the values' dtype (GPT-2)."""
    upcast_reordered: bool = False
    """Eager attention multiplies fp32 copies outside autocast (an option of GPT-2)."""
    causal: bool = True
    sliding_window: int | None = None
    softcap: bool = False
    """Scores pass through a tanh (Gemma 2): only eager attention can do that."""
    dropout: float = 0.0
    """Probability on the attention weights."""
    fp32_softmax: bool = True
    """Eager attention computes the softmax in fp32 and casts back; BERT does not."""
    names_weights: bool = True
    """The layer has a name for eager attention's weights, so that they live until it ends."""
    padding_mask: bool = False
    """The class adds a mask of padding to the scores even where there is none (LayoutLM)."""

    @property
    def is_projected_first(self) -> bool:
        """Whether all three are projected before any is seen as heads, as where whole rows of queries
        and keys are normed at once (OLMo 2)."""
        return self.query_key_norm_at_once and not self.query_key_norm_per_head
