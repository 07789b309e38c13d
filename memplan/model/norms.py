"""Normalizations, as data."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class NormKind(Enum):
    """How a normalization is computed, operation by operation."""

    LAYER = "layer_norm"
    """``torch.nn.LayerNorm``: one fused kernel."""
    RMS = "rms_norm"
    """Llama's: an fp32 copy, normalized, cast back, then times the weight."""
    RMS_T5 = "rms_norm_t5"
    """T5's: only the variance is computed on an fp32 copy."""
    RMS_GEMMA = "rms_norm_gemma"
    """Gemma's: everything in fp32, times ``1 + weight``, then cast back."""
    RMS_UPCAST = "rms_norm_upcast"
    """OLMo 2's: everything in fp32, the weight's product too, then cast back."""
    RMS_POWER = "rms_norm_power"
    """Gemma 4's: as Gemma's without the one, by a power of the mean square."""
    LAYER_PLAIN = "layer_norm_plain"
    """OLMo's: an fp32 layer norm that owns no parameters."""
    LAYER_ONE_PLUS = "layer_norm_one_plus"
    """Nemotron's: a layer norm with one plus its weight, in autocast's dtype."""
    LAYER_UPCAST = "layer_norm_upcast"
    """Cohere's: a layer norm written out in fp32, with a weight only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """A normalization layer."""

    kind: NormKind
    bias: bool = False
    """Whether it owns a bias beside its weight."""
    weight: bool = True
    """Whether it owns a weight (OPT can leave both out)."""
