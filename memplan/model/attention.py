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
    joined: bool = False
    """Heads are joined from a rotated part and the rest even where nothing rests (Phi-3)."""


class AttentionForm(Enum):
    """Who computes the scores: transformers' shared functions, or the class in steps of its own."""

    INTERFACE = "interface"
    """``ALL_ATTENTION_FUNCTIONS``: eager, sdpa or flash, as asked for."""
    OWN = "own"
    """As its class says (``memplan.classes``)."""


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
    projection_clamped: bool = False
    """Queries, keys and values are clamped in place (OLMo's ``clip_qkv``)."""
    output_gate: OutputGate = OutputGate.NONE
    inner_norm: NormSpec | None = None
    """A norm on the heads' output, before the output projection (BitNet)."""
    sinks: bool = False
    """A learned score of each head joins the softmax as one more key."""
    form: AttentionForm = AttentionForm.INTERFACE
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
