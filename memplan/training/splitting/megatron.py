"""Megatron's own settings, as data; each is called what Megatron-LM's argument for it is called.

Sources: Megatron-core 0.16.1, ``core/transformer/transformer_config.py``, ``core/optimizer/
optimizer_config.py``, ``core/distributed/distributed_data_parallel_config.py``; defaults are those of
Megatron-LM's ``megatron/training/arguments.py``.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass


class TransformerImpl(Enum):
    """Whose layers run."""

    LOCAL = "local"
    """Megatron's own: attention with its scores written out (``get_gpt_layer_local_spec``)."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """TransformerEngine's: norm and linear layer in one, fused attention."""
    KWAI = "kwai"
    """Megatron-Kwai's fork: local products, flash-attention over gathered keys and values."""


class RecomputeGranularity(Enum):
    """What is computed again in backward."""

    NONE = "none"
    FULL = "full"
    """Whole layers."""
    SELECTIVE = "selective"
    """Modules of every layer: ``recompute_modules``."""


class RecomputeMethod(Enum):
    """Which layers, where it is whole ones."""

    UNIFORM = "uniform"
    """All, in chunks of ``recompute_num_layers``."""
    BLOCK = "block"
    """The first ``recompute_num_layers``, each on its own."""


class RecomputeModule(Enum):
    """A part of a layer that is computed again on its own."""

    CORE_ATTN = "core_attn"
    """Scores, softmax and dropout, up to the product with the values."""
    MLP = "mlp"
    """The whole dense feed-forward network."""
    LAYERNORM = "layernorm"
    """Norms that are modules of their own, whose results are let go behind attention, and behind the network."""
    MLA_UP_PROJ = "mla_up_proj"
    """Latent attention's products out of its narrow vectors, and its rotary embeddings."""
    MOE = "moe"
    """The whole mixture: router, exchanges, routed and shared experts."""
    MOE_ACT = "moe_act"
    """The activation of routed experts."""
    SHARED_EXPERTS = "shared_experts"
    """The dense network beside routed experts."""
    MLP_ACT = "mlp_act"
    """The activation of a dense network, gate and all (``kaimm_recompute_mlp_activation_func``)."""


class LossFusion(Enum):
    """Whose fused cross-entropy (``cross_entropy_fusion_impl``)."""

    NATIVE = "native"
    """Megatron's, compiled: fp32 logits become their softmax in place."""
    TE = "te"
    """TransformerEngine's: the logits become their gradient in place."""


ALL_DTYPES = (DType.FP32, DType.BF16, DType.FP16)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayers:
    """What decides how Megatron's layers are written down; the field names are the option names."""

    transformer_impl: TransformerImpl = TransformerImpl.TRANSFORMER_ENGINE
    """Whose layers run."""
    recompute_granularity: RecomputeGranularity = RecomputeGranularity.NONE
    """What is computed again in backward; ``checkpointing`` says it too."""
    recompute_method: RecomputeMethod = RecomputeMethod.UNIFORM
    """Which layers, where it is whole ones."""
    recompute_num_layers: int = 1
    """Layers of a chunk (uniform), or how many (block)."""
    recompute_modules: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
    """Which parts of a layer, where it is selective."""
    distribute_saved_activations: bool = False
    """Each tensor-parallel rank keeps a share of what a recomputed layer is given."""
    gradient_accumulation_fusion: bool = True
    """Products write weights' gradients into the main gradients themselves."""
    masked_softmax_fusion: bool = True
    """Scale, mask and softmax in one kernel, for up to 4096 tokens."""
    attention_softmax_in_fp32: bool = False
    """Without that kernel the scores are widened first."""
    bias_gelu_fusion: bool = True
    """Bias and GELU in one kernel."""
    bias_swiglu_fusion: bool = True
    """Gate and product of a gated network in one kernel."""
    bias_dropout_fusion: bool = True
    """Bias, dropout and residual sum in one kernel."""
    apply_rope_fusion: bool = True
    """Rotary embeddings in one kernel, which TransformerEngine has."""
    cross_entropy_loss_fusion: bool = False
    """The loss as one kernel."""
    cross_entropy_fusion_impl: LossFusion = LossFusion.NATIVE
    """Whose."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of it times the tensor-parallel degree."""
    expert_tensor_parallel_size: int | None = None
    """Ranks over which each expert is split; None: as many as other layers are."""
    wrap_with_ddp: bool = True
    """Gradients are added up in Megatron's buffers; else they are autograd's own (a loop of one's own)."""

    def expert_ranks(self, tensor_parallel: int) -> int:
        """Ranks over which each expert is split."""
        return self.expert_tensor_parallel_size or tensor_parallel

    def recomputes(self, module: RecomputeModule) -> bool:
        """Whether a part of each layer is computed again on its own."""
        selective = self.recompute_granularity is RecomputeGranularity.SELECTIVE
        return selective and module in self.recompute_modules
