"""The loss on the next token: shifted labels and cross entropy."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.training.choices_of_kernels.kernels import LossKernel


def causal_lm_loss(t: Tape, logits: Tensor, vocab_size: int) -> Tensor:
    """``ForCausalLMLoss``: fp32 logits, log-softmax, negative log-likelihood."""
    tokens = logits.numel // vocab_size
    if t.kernels.loss is LossKernel.SHIFTED_UNCAST:
        return shifted_loss(t, logits, vocab_size)
    full = logits if t.kernels.loss is LossKernel.UNCAST else t.cast(logits, DType.FP32)
    if t.kernels.loss in (LossKernel.SHIFTED, LossKernel.SHIFTED_APART):
        return shifted_loss(t, full, vocab_size)
    labels, padded = next_token_labels(t, tokens, padded=True)
    loss = cross_entropy(t, full, labels)
    t.touch(padded)
    return loss


def next_token_labels(t: Tape, tokens: int, *, padded: bool) -> tuple[Tensor, Tensor]:
    """Labels moved by one token, and what they were copied from: themselves, or padded by one.

    Where ranks share sequences they are moved before, and come with the batch.
    """
    if t.options.context_parallel is not None:
        given = Tensor(tokens, DType.INT64, Storage(allocated_bytes(tokens, DType.INT64), -1, 0))
        return given, given
    labels = t.tensor(tokens, DType.INT64)
    if not padded:
        t.record(OperationKind.SHIFT_LABELS, (), (labels,))
        return labels, labels
    longer = t.tensor(tokens + t.options.batch_size, DType.INT64)
    t.record(OperationKind.PAD, (), (longer,))
    if t.options.batch_size == 1:
        return t.view(longer, tokens), longer  # one row of a longer one is in rows already
    labels = t.tensor(tokens, DType.INT64)
    t.record(OperationKind.CONTIGUOUS, (longer,), (labels,))
    return labels, longer


def shifted_loss(t: Tape, full: Tensor, vocab_size: int) -> Tensor:
    """transformers before 4.49: all logits but the last of each sequence, copied.

    The class held on to the uncut logits meanwhile, in fp32 where it had cast them; in backward
    the cut's gradient is a zero-filled tensor of the whole.
    """
    rows = full.numel // vocab_size - t.options.batch_size
    cut = t.contiguous(t.slice(full, max(rows, 1) * vocab_size))
    labels, _ = next_token_labels(t, max(rows, 1), padded=False)
    loss = cross_entropy(t, cut, labels)
    t.touch(full, cut)
    return loss


def cross_entropy(t: Tape, logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """Log-softmax and its mean over the labels.

    ``cross_entropy_loss`` asks for the log-softmax in the logits' own dtype, which autocast
    respects; only the negative log-likelihood is widened (aten/src/ATen/native/LossNLL.cpp).
    """
    group = t.options.tensor_parallel
    if group is not None and group.loss:
        from memplan.graph.splitting.tensor_parallel import parallel_cross_entropy  # only then

        return parallel_cross_entropy(t, logits, labels)
    log_probabilities = t.tensor(logits.numel, logits.dtype)
    t.record(
        OperationKind.LOG_SOFTMAX, (logits,), (log_probabilities,), saves=(log_probabilities,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    if t.autocast is not None:
        log_probabilities = t.cast(log_probabilities, DType.FP32)
    dtype = log_probabilities.dtype
    loss, total_weight = t.tensor(1, dtype), t.tensor(1, dtype)
    inputs: tuple[Tensor, ...] = (log_probabilities,)
    gradients: tuple[int, ...] = (Gradient.FRESH,)
    if labels is not None:
        inputs += (labels,)
        gradients += (Gradient.NONE,)
    t.record(
        OperationKind.NLL_LOSS, inputs, (loss, total_weight), saves=(*inputs, total_weight),
        gradients=gradients,
    )  # fmt: skip
    t.touch(logits)
    return loss


def span_loss(t: Tape, logits: Tensor, num_labels: int) -> Tensor:
    """Question answering: start and end scores copied apart, a cross-entropy of each, their mean."""
    tokens = logits.numel // num_labels
    start, end = t.split(logits, tokens, tokens)
    first = t.elementwise(OperationKind.CLONE, start)
    last = t.elementwise(OperationKind.CLONE, end)
    loss = t.scale(t.add(cross_entropy(t, first), cross_entropy(t, last)))
    t.give_out(logits)
    return loss
