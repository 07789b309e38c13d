"""From the last hidden states to the loss of a language model, by every known way.

The choice moves a Llama-3.1-8B step by tens of GiB: logits are tokens x vocabulary, in up to three
copies at once. Sources: transformers 5.23 ``loss/loss_utils.py``; torchtitan 0.3.0
``components/loss.py``; liger-kernel 0.8.5 ``ops/fused_linear_cross_entropy.py``; Megatron-core
0.16.1 ``core/tensor_parallel/cross_entropy.py``.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import causal_lm_loss
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor, allocated_bytes
from memplan.training.kernels import LossKernel

NUM_CHUNKS = 8
"""Pieces of torchtitan's chunked loss (``ChunkedCELoss.Config.num_chunks``)."""
LOSS_BYTES_PER_LOGIT = 12
"""Three fp32 tensors of logits' size alive at once in backward: log-probabilities, their gradient,
the logits' gradient."""

GRADIENTS_IN_FORWARD = frozenset({LossKernel.FUSED_LINEAR, LossKernel.CHUNKED})
"""Losses that take the output matrix itself and never make all logits."""

Project = Callable[[Tensor], Tensor]
"""The output matrix with what the model does to its logits."""


def language_model_loss(
    t: Tape, x: Tensor, weight: Parameter, vocab_size: int, project: Project
) -> Tensor:
    """The loss of the hidden states ``x`` through ``weight``, the output matrix."""
    kernel = t.kernels.loss
    if kernel is LossKernel.FUSED_LINEAR:
        return fused_linear_cross_entropy(t, x, weight)
    if kernel is LossKernel.CHUNKED:
        return chunked_cross_entropy(t, x, weight)
    logits = project(x)
    if kernel is LossKernel.PARALLEL_FUSED:
        return softmax_in_place(t, logits)
    if kernel is LossKernel.SHIFTED:
        # ``logits = logits.float()``: what the class returns is the copy.
        logits = t.cast(logits, DType.FP32)
    loss = causal_lm_loss(t, logits, vocab_size)
    t.returned.append(logits)
    keep_outputs(t, logits)
    return loss


def keep_outputs(t: Tape, logits: Tensor) -> None:
    """What a training loop does with the logits that the model returns beside the loss.

    accelerate's mixed precision copies every output to fp32 (``ConvertOutputsToFp32``); a loop that
    holds the outputs keeps them until after the backward pass.
    """
    outputs = logits
    if t.options.upcast_outputs and logits.dtype is not DType.FP32:
        outputs = t.tensor(logits.numel, DType.FP32)
        t.record(OperationKind.OUTPUTS_TO_FP32, (), (outputs,))
        t.touch(logits)
    if t.options.outputs_held:
        t.hold(outputs)
    elif t.kernels.loss is not LossKernel.SHIFTED:
        t.give_out(outputs)


def softmax_in_place(t: Tape, logits: Tensor) -> Tensor:
    """Megatron's: fp32 logits become their softmax, and later their gradient, in one storage."""
    full = t.cast(logits, DType.FP32)
    if full is logits:
        full = t.contiguous(logits)
    loss = t.tensor(1, DType.FP32)
    t.record(
        OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY, (full,), (loss,), saves=(full,),
        gradients=(Gradient.SAVED,),
    )  # fmt: skip
    return loss


def fused_linear_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """Liger's: both gradients are made in the forward pass, over a piece of the logits at a time."""
    vocab_size, width = weight.shape
    tokens = x.numel // width
    rows = liger_chunk_rows(tokens, vocab_size=vocab_size, hidden_size=width)
    logits_dtype = t.autocast or x.dtype
    scratch = allocated_bytes(rows * vocab_size, logits_dtype)
    return _gradients_in_forward(
        t,
        OperationKind.FUSED_LINEAR_CROSS_ENTROPY,
        x,
        weight,
        gradient_dtype=x.dtype,
        scratch_bytes=scratch,
    )


def liger_chunk_rows(tokens: int, *, vocab_size: int, hidden_size: int) -> int:
    """Rows of logits that Liger makes at once: about as many bytes as the hidden states have.

    Equation: ``min(BT, next_power_of_2(BT / ceil(V / H)))``, its constant C being 1.

    >>> liger_chunk_rows(8192, vocab_size=128256, hidden_size=4096)
    256
    """
    pieces = -(-vocab_size // hidden_size)
    wanted = -(-tokens // pieces)
    return min(tokens, 1 << (wanted - 1).bit_length())


def chunked_cross_entropy(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """torchtitan's: head, loss and their backward pass over an eighth of the sequence at a time.

    The gradient of the hidden states is gathered in fp32, that of the matrix in place.
    """
    vocab_size, width = weight.shape
    rows = -(-(x.numel // width) // NUM_CHUNKS)
    half = t.autocast or x.dtype
    logits = 0 if half is DType.FP32 else allocated_bytes(rows * vocab_size, half)
    scratch = rows * vocab_size * LOSS_BYTES_PER_LOGIT + logits
    return _gradients_in_forward(
        t,
        OperationKind.CHUNKED_CROSS_ENTROPY,
        x,
        weight,
        gradient_dtype=DType.FP32,
        scratch_bytes=scratch,
    )


def _gradients_in_forward(
    t: Tape,
    kind: OperationKind,
    x: Tensor,
    weight: Parameter,
    *,
    gradient_dtype: DType,
    scratch_bytes: int,
) -> Tensor:
    """An operation that keeps its inputs' gradients instead of its inputs."""
    input_gradient = t.tensor(x.numel, gradient_dtype)
    saves = [input_gradient]
    gradients = [Gradient.SAVED, Gradient.NONE]
    if weight.requires_grad:
        saves.append(t.tensor(weight.numel, weight.dtype))
        gradients[1] = Gradient.SAVED
    loss = t.tensor(1, DType.FP32)
    t.record(
        kind, (x, weight), (loss, *saves), saves=saves, gradients=gradients,
        forward_scratch_bytes=scratch_bytes, flops=6 * x.numel * weight.shape[0],
    )  # fmt: skip
    for tensor in saves:
        tensor.requires_grad = False
    return loss
