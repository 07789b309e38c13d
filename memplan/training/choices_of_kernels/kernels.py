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
    FLASH3 = "flash3"
    """Its third version, for Hopper: its own scratch in backward."""

    @property
    def is_package(self) -> bool:
        """Whether the flash-attention package is called, which is never given a mask."""
        return self in (AttentionKernel.FLASH, AttentionKernel.FLASH3)


ATTENTION_NAMES = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3",
    "kernels-community/flash-attn": "flash", "kernels-community/flash-attn2": "flash",
    "kernels-community/flash-attn3": "flash3", "kernels-community/vllm-flash-attn3": "flash3",
}  # fmt: skip
"""transformers' ``attn_implementation`` -> the value of a kernel."""


class NormKernel(Enum):
    """How RMS norms are computed."""

    EAGER = "eager"
    """Written out in Python, as the model's class has it."""
    FUSED = "fused"
    """One kernel that keeps its input and a statistic per row: ``torch.nn.RMSNorm``."""
    LIGER = "liger"
    """The same, and its backward pass writes over the gradient it is given: Liger's and Unsloth's."""
    LIGER_APART = "liger_apart"
    """Liger's with ``in_place=False``, where the gradient it is given is the residual's too."""


class FeedForwardKernel(Enum):
    """How a gated feed-forward network multiplies its two halves."""

    EAGER = "eager"
    """Activation and product as torch's own operations."""
    FUSED = "fused"
    """One kernel that keeps gate and up and writes their gradients over them: Liger's SwiGLU and GeGLU."""


class RotaryKernel(Enum):
    """How queries and keys are turned by their positions."""

    EAGER = "eager"
    """Written out in Python, as the model's class has it."""
    LIGER = "liger"
    """Where they lie, by one kernel that keeps the tables; its backward pass too: Liger's."""
    UNSLOTH = "unsloth"
    """The same in forward; in backward into new tensors: Unsloth's."""
    COMPLEX = "complex"
    """As complex numbers in fp32, cast back: torchtitan's."""


class ScanKernel(Enum):
    """How Mamba's scans over the tokens are computed."""

    EAGER = "eager"
    """transformers' own functions, in torch's operations: slow, and much is kept."""
    PACKAGE = "package"
    """One kernel with the convolution before it and the projection behind it: mamba-ssm and
    causal-conv1d, which transformers takes where both are installed."""


class LossKernel(Enum):
    """How logits become a loss; ``memplan.training.choices_of_kernels.losses`` says what each keeps and makes."""

    EAGER = "eager"
    """transformers today: fp32 logits, log-softmax."""
    UNCAST = "uncast"
    """log-softmax of the logits in their own dtype, unshifted (NeMo AutoModel with ``fp32_upcast`` off)."""
    SHIFTED = "shifted"
    """transformers before 4.46: the class puts fp32 logits in their place, and copies them shifted."""
    SHIFTED_APART = "shifted_apart"
    """transformers 4.46 to 4.48: the same in a function, beside the logits that the class holds."""
    SHIFTED_UNCAST = "shifted_uncast"
    """The same in the logits' own dtype: GPT-2, GPT-BigCode and their like before 4.49."""
    CHUNKED = "chunked"
    """torchtitan's: head and loss over pieces of the sequence, with their backward passes; ``loss_tiles`` of
    them, by default 8."""
    FUSED_LINEAR = "fused_linear"
    """Liger's fused linear cross-entropy: gradients are made in the forward pass."""
    PARALLEL_FUSED = "fused"
    """Megatron's: fp32 logits turned into their softmax in place."""
    LIGER = "liger"
    """Liger's cross-entropy: fp32 logits turned into their gradient in place."""
    FLASH_ATTENTION = "flash_attn"
    """flash-attention's with ``inplace_backward``: the logits' own dtype (llm-foundry)."""
    FOAK = "foak"
    """fms-acceleration's: a shifted fp32 copy, which backward writes over."""
    FOAK_REBOUND = "foak_rebound"
    """The same in transformers before 4.46, whose class puts fp32 logits in their place."""
    FOAK_UNCAST = "foak_uncast"
    """The same in the logits' own dtype: GPT-BigCode before transformers 4.49."""
    UNSLOTH = "unsloth"
    """Unsloth's fast cross-entropy: the logits' own dtype, a new tensor for their gradient."""
    UNSLOTH_FUSED = "unsloth_fused"
    """Unsloth's fused one: piece by piece with both gradients, as many as 4 GiB are enough for."""
    CUT = "cut"
    """Apple's cut cross-entropy: no logits at all."""
    TORCHTUNE = "torchtune"
    """torchtune's: logits of all pieces, each widened to fp32 on its own."""
    TRL = "trl"
    """TRL's fused head: tiles of the logits in both passes, gradients gathered in fp32."""
    TILED = "tiled"
    """ALST's ``sequence_tiled_compute``: head and loss tile by tile, again in backward."""
    TILED_GRADIENTS = "tiled_gradients"
    """ALST's ``TiledFusedLogitsLoss``: each tile with its backward pass in the forward pass."""


TILED_LOSSES = frozenset({LossKernel.TILED, LossKernel.TILED_GRADIENTS})
"""Those that ``loss_tiles`` says the number of tiles of."""


class Packing(Enum):
    """How the sequences of a micro-batch lie in its rows."""

    NONE = "none"
    """Each in a row of its own, padded to ``seq_len``; or rows cut out of a stream of tokens, which are
    not told apart (TRL's ``wrapped``)."""
    DOCUMENTS = "documents"
    """Rows of ``seq_len`` tokens with several documents each, which do not see one another: their
    position ids begin anew."""
    PADDING_FREE = "padding_free"
    """All in one row, without padding (``DataCollatorWithFlattening``, TRL's ``padding_free`` and
    ``bfd``): micro-batch x ``seq_len`` tokens."""


class SelectivePolicy(Enum):
    """What selective checkpointing computes again."""

    EVERY_OTHER_MATMUL = "every_other_matmul"
    """torchtitan: attention outputs and every other linear layer's are kept."""
    CORE_ATTENTION = "core_attention"
    """Megatron: only scores, softmax and dropout of the attention are computed again."""


class ExpertKernel(Enum):
    """How the experts of a mixture are multiplied."""

    GROUPED = "grouped"
    """Rows sorted by expert, two grouped products over all experts' weights (transformers 5)."""
    MODULES = "modules"
    """A module with its own linear layers for each expert, one after another (transformers 4)."""


class KernelPreset(Enum):
    """Code bases with a choice of kernels of their own."""

    HF = "hf"
    HF4 = "hf4"
    """transformers 4.46 to 4.48."""
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    LIGER = "liger"
    UNSLOTH = "unsloth"


OF_TRANSFORMERS = (KernelPreset.HF, KernelPreset.LIGER)
"""Under which transformers' own classes run, of the version that is known (5.23)."""

WHOLE = 1
"""Tiles of what is not cut."""
FITTING_TILES = 0
"""Tiles as ALST's recipes have them: of a network tokens over hidden size, rounded up; of a loss, as
many as give each a GiB of fp32 logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One implementation for each kind of operation."""

    attention: AttentionKernel = AttentionKernel.SDPA
    norm: NormKernel = NormKernel.EAGER
    feed_forward: FeedForwardKernel = FeedForwardKernel.EAGER
    loss: LossKernel = LossKernel.EAGER
    rotary: RotaryKernel = RotaryKernel.EAGER
    scan: ScanKernel = ScanKernel.EAGER
    fused_elementwise: bool = False
    """Softmax with its scale and mask, and each activation, in one kernel in the compute dtype."""
    selective: SelectivePolicy = SelectivePolicy.EVERY_OTHER_MATMUL
    """What ``checkpointing: selective`` means."""
    experts: ExpertKernel = ExpertKernel.GROUPED
    mlp_tiles: int = 1
    """Tiles in which feed-forward networks run, forward and again in backward (ALST's ``TiledMLP``);
    ``FITTING_TILES``: as many as fit."""
    loss_tiles: int = 0
    """Tiles of a loss that runs in tiles; ``FITTING_TILES``: as many as fit."""
    keeps_cache: bool = False
    """Classes that once cached keys and values under checkpointing too do so (GPT-BigCode's)."""


def is_replacing(kernels: Kernels) -> bool:
    """Whether others' classes stand in the place of a model's own."""
    own = Kernels()
    return kernels.experts is ExpertKernel.MODULES or (
        kernels.norm,
        kernels.feed_forward,
        kernels.mlp_tiles,
        kernels.scan,
    ) != (own.norm, own.feed_forward, own.mlp_tiles, own.scan)


KERNEL_PRESETS: dict[KernelPreset, Kernels] = {
    KernelPreset.HF: Kernels(),
    KernelPreset.HF4: Kernels(
        loss=LossKernel.SHIFTED_APART, experts=ExpertKernel.MODULES, keeps_cache=True
    ),
    # torchtitan 0.3.0: nn.RMSNorm, SDPA, rotary in complex numbers, eager SwiGLU, chunked loss off.
    KernelPreset.TORCHTITAN: Kernels(norm=NormKernel.FUSED, rotary=RotaryKernel.COMPLEX),
    KernelPreset.MEGATRON: Kernels(
        attention=AttentionKernel.EAGER,
        norm=NormKernel.FUSED,
        loss=LossKernel.PARALLEL_FUSED,
        fused_elementwise=True,
        selective=SelectivePolicy.CORE_ATTENTION,
    ),
    # For the models that Liger has all its kernels for; ``memplan.training.choices_of_kernels.liger`` says which.
    KernelPreset.LIGER: Kernels(
        norm=NormKernel.LIGER,
        feed_forward=FeedForwardKernel.FUSED,
        loss=LossKernel.FUSED_LINEAR,
        rotary=RotaryKernel.LIGER,
    ),
    # Its networks are transformers' own, but for its functions over adapters.
    KernelPreset.UNSLOTH: Kernels(
        norm=NormKernel.LIGER, loss=LossKernel.UNSLOTH_FUSED, rotary=RotaryKernel.UNSLOTH
    ),
}
"""Sources: transformers 5.23 and 4.48.1, torchtitan 0.3.0, Megatron-core 0.16.1, liger-kernel 0.8.5,
unsloth 2026.10."""
