"""Feed-forward networks and mixtures of experts, as data."""

from __future__ import annotations

from enum import Enum

from memplan.fast_dataclass import dataclass


class Activation(Enum):
    """A feed-forward network's nonlinearity, by Hugging Face's names."""

    RELU = "relu"
    RELU_SQUARED = "relu2"
    GELU = "gelu"
    GELU_PYTHON = "gelu_python"
    """The exact form written out in Python with the error function (ESM)."""
    GELU_NEW = "gelu_new"
    """The tanh form written out in Python: several elementwise operations."""
    GELU_TANH = "gelu_pytorch_tanh"
    """The tanh form as one kernel."""
    GELU_FAST = "gelu_fast"
    QUICK_GELU = "quick_gelu"
    HARDSWISH = "hardswish"
    SILU = "silu"
    TANH = "tanh"
    BLOOM_GELU = "bloom_gelu"
    XIELU = "xielu"
    """Two parabolas and an exponential, with two trained numbers (Apertus)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardSpec:
    """A dense feed-forward network."""

    intermediate_size: int
    activation: Activation
    gated: bool = False
    """``act(gate(x)) * up(x)`` rather than ``act(up(x))``."""
    fused_gate_up: bool = False
    """Gate and up are one linear layer whose output is split in two (Phi-3)."""
    bias: bool = False
    activation_dropout: float = 0.0
    """Probability on the activations, before the last linear layer."""
    dropout_module: bool = False
    """That dropout is a module, not a call of a function."""
    normed_inside: bool = False
    """A norm stands before its last linear layer (Kosmos-2.5)."""
