"""What each way from hidden states to a loss keeps and makes: one row for each ``LossKernel``.

The choice moves a Llama-3.1-8B step by tens of GiB. A row is data: ``memplan.graph.losses.tasks`` reads it and
writes the operations. Another code base's loss that does the same is another name of the same row.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass
from memplan.training.choices_of_kernels.kernels import LossKernel


class LossGradient(Enum):
    """Where the gradient of the logits goes."""

    TORCH = "torch"
    """torch's log-softmax: its result is kept, and two more tensors of its size made in backward."""
    FRESH = "fresh"
    """One kernel keeps the logits; their gradient is a new tensor."""
    IN_PLACE = "in_place"
    """One kernel keeps the logits, and writes their gradient over them."""


class MatrixLoss(Enum):
    """Losses that are given the output matrix itself, and never have all logits in fp32."""

    FORWARD_GRADIENTS = "forward_gradients"
    """Piece by piece, with both gradients, in the forward pass (Liger)."""
    BUDGETED_GRADIENTS = "budgeted_gradients"
    """The same in fewer pieces, as a budget of memory allows (Unsloth)."""
    BACKWARD_BY_PIECE = "backward_by_piece"
    """Piece by piece, each with a backward pass of its own, in the forward pass (torchtitan)."""
    CUT = "cut"
    """Tiles of the logits in registers: one number a row is kept (Apple)."""
    TILES = "tiles"
    """Tiles of the logits, made again in backward, whose gradients are gathered in fp32 (TRL)."""
    TILED = "tiled"
    """Whole stretches of tokens, made again in backward (ALST)."""
    TILED_GRADIENTS = "tiled_gradients"
    """The same, each with a backward pass of its own, in the forward pass (ALST)."""
    PIECES = "pieces"
    """Piece by piece through torch's own operations, all kept (torchtune)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossForm:
    """One way from hidden states to a loss."""

    source: str
    """Where it was read."""
    matrix: MatrixLoss | None = None
    """None: all logits are made first."""
    upcast: bool = True
    """The logits are copied to fp32 first."""
    shifted: bool = False
    """All logits but the last of each sequence are copied."""
    rebinds: bool = False
    """The class calls its fp32 copy logits too: those it was made of are gone before the loss."""
    gradient: LossGradient = LossGradient.TORCH


LOSS_FORMS: dict[LossKernel, LossForm] = {
    LossKernel.EAGER: LossForm(source="transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"),
    LossKernel.UNCAST: LossForm(
        source="nemo-automodel 0.7.0, components/loss/masked_ce.py, MaskedCrossEntropy",
        upcast=False,
    ),
    LossKernel.SHIFTED: LossForm(
        source="transformers 4.44, models/llama/modeling_llama.py", shifted=True, rebinds=True
    ),
    LossKernel.SHIFTED_APART: LossForm(
        source="transformers 4.48.1, loss/loss_utils.py, ForCausalLMLoss", shifted=True
    ),
    LossKernel.SHIFTED_UNCAST: LossForm(
        source="transformers 4.44, models/gpt2/modeling_gpt2.py", shifted=True, upcast=False
    ),
    LossKernel.PARALLEL_FUSED: LossForm(
        source="Megatron-core 0.16.1, core/tensor_parallel/cross_entropy.py",
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.LIGER: LossForm(
        source="liger-kernel 0.8.5, ops/cross_entropy.py, LigerCrossEntropyFunction",
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.FLASH_ATTENTION: LossForm(
        source="flash-attn 2.8, ops/triton/cross_entropy.py, CrossEntropyLoss, inplace_backward=True",
        upcast=False,
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.FOAK: LossForm(
        source="fms-acceleration-foak, kernels/unsloth/cross_entropy_loss.py, FastForCausalLMLoss",
        shifted=True,
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.FOAK_REBOUND: LossForm(
        source="fms-acceleration-foak, kernels/unsloth/cross_entropy_loss.py, FastCrossEntropyLoss",
        shifted=True,
        rebinds=True,
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.FOAK_UNCAST: LossForm(
        source="fms-acceleration-foak, kernels/unsloth/cross_entropy_loss.py, FastCrossEntropyLoss",
        shifted=True,
        upcast=False,
        gradient=LossGradient.IN_PLACE,
    ),
    LossKernel.UNSLOTH: LossForm(
        source="unsloth 2026.10, kernels/cross_entropy_loss.py, Fast_CrossEntropyLoss",
        upcast=False,
        gradient=LossGradient.FRESH,
    ),
    LossKernel.FUSED_LINEAR: LossForm(
        source="liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py",
        matrix=MatrixLoss.FORWARD_GRADIENTS,
    ),
    LossKernel.UNSLOTH_FUSED: LossForm(
        source="unsloth_zoo 2026.10, fused_losses/cross_entropy_loss.py, UnslothFusedLoss",
        matrix=MatrixLoss.BUDGETED_GRADIENTS,
    ),
    LossKernel.CHUNKED: LossForm(
        source="torchtitan 0.3.0, components/loss.py, ChunkedLossWrapper",
        matrix=MatrixLoss.BACKWARD_BY_PIECE,
    ),
    LossKernel.CUT: LossForm(
        source="cut-cross-entropy 25.1, cce.py, LinearCrossEntropyFunction", matrix=MatrixLoss.CUT
    ),
    LossKernel.TRL: LossForm(
        source="trl 1.16, kernels/chunked_logprob.py, ChunkedLogProbFunction",
        matrix=MatrixLoss.TILES,
    ),
    LossKernel.TILED: LossForm(
        source="deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, sequence_tiled_compute",
        matrix=MatrixLoss.TILED,
    ),
    LossKernel.TILED_GRADIENTS: LossForm(
        source="deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, TiledFusedLogitsLoss",
        matrix=MatrixLoss.TILED_GRADIENTS,
    ),
    LossKernel.TORCHTUNE: LossForm(
        source="torchtune 0.6.1, modules/loss/ce_chunked_output_loss.py, CEWithChunkedOutputLoss",
        matrix=MatrixLoss.PIECES,
    ),
}
"""Every loss that a setup can name."""
