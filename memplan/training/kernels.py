"""Which implementation of each operation a training run uses.

What an operation keeps for the backward pass depends on how it is written, so the implementations
are data: a ``Kernels`` value names one for each kind of operation, and a preset gives the choice of
a whole code base.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass


class AttentionKernel(Enum):
    """How attention scores are computed."""

    EAGER = "eager"
    """Written out in Python: s x s tensors of scores."""
    SDPA = "sdpa"
    """torch's dispatcher: flash, memory-efficient or math, by GPU, dtype and mask."""
    FLASH = "flash"
    """The flash-attention package: always flash."""


class NormKernel(Enum):
    """How RMS norms are computed."""

    EAGER = "eager"
    FUSED = "fused"
    """One kernel that keeps its input and a statistic per row."""


class FeedForwardKernel(Enum):
    """How a gated feed-forward network multiplies its two halves."""

    EAGER = "eager"
    FUSED = "fused"
    """One kernel that keeps gate and up and recomputes the rest (Liger)."""


class LossKernel(Enum):
    """How logits become a loss."""

    EAGER = "eager"
    """transformers today: fp32 logits, log-softmax."""
    SHIFTED = "shifted"
    """transformers before 4.45: the shifted logits are copied."""
    SHIFTED_UNCAST = "shifted_uncast"
    """The same in the logits' own dtype: GPT-2, GPT-BigCode and their like before 4.49."""
    CHUNKED = "chunked"
    """The head and the loss run over pieces of the sequence, each recomputed in backward."""
    FUSED_LINEAR = "fused_linear"
    """Liger's fused linear cross-entropy: gradients are made in the forward pass."""
    PARALLEL_FUSED = "fused"
    """Megatron's: fp32 logits turned into their softmax in place."""


class SelectivePolicy(Enum):
    """What selective checkpointing computes again."""

    EVERY_OTHER_MATMUL = "every_other_matmul"
    """torchtitan: attention outputs and every other linear layer's are kept."""
    CORE_ATTENTION = "core_attention"
    """Megatron: only scores, softmax and dropout of the attention are computed again."""


class KernelPreset(Enum):
    """Code bases with a choice of kernels of their own."""

    HF = "hf"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    LIGER = "liger"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One implementation for each kind of operation."""

    attention: AttentionKernel = AttentionKernel.SDPA
    norm: NormKernel = NormKernel.EAGER
    feed_forward: FeedForwardKernel = FeedForwardKernel.EAGER
    loss: LossKernel = LossKernel.EAGER
    fused_rotary: bool = False
    """Rotary embeddings in one kernel."""
    fused_elementwise: bool = False
    """Softmax with its scale and mask, and each activation, in one kernel in the compute dtype."""
    selective: SelectivePolicy = SelectivePolicy.EVERY_OTHER_MATMUL
    """What ``checkpointing: selective`` means."""


KERNEL_PRESETS: dict[KernelPreset, Kernels] = {
    KernelPreset.HF: Kernels(),
    # torchtitan 0.3.0: nn.RMSNorm, SDPA, rotary in complex numbers, eager SwiGLU, chunked loss off.
    KernelPreset.TORCHTITAN: Kernels(norm=NormKernel.FUSED, fused_rotary=True),
    KernelPreset.MEGATRON: Kernels(
        attention=AttentionKernel.EAGER,
        norm=NormKernel.FUSED,
        loss=LossKernel.PARALLEL_FUSED,
        fused_elementwise=True,
        selective=SelectivePolicy.CORE_ATTENTION,
    ),
    KernelPreset.LIGER: Kernels(
        norm=NormKernel.FUSED,
        feed_forward=FeedForwardKernel.FUSED,
        loss=LossKernel.FUSED_LINEAR,
        fused_rotary=True,
    ),
}
"""Sources: transformers 5.23, torchtitan 0.3.0, Megatron-core 0.16.1, liger-kernel 0.8.5."""
