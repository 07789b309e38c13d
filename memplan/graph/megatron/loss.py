"""Megatron's output layer and its cross-entropy over a split vocabulary.

Megatron-core 0.16.1, core/tensor_parallel/cross_entropy.py, core/fusions/fused_cross_entropy.py;
TransformerEngine 2.11, pytorch/triton/cross_entropy.py.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.megatron.context import MegatronContext
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Group, Send, Sends
from memplan.training.splitting.megatron import LossFusion


def vocab_parallel_loss(c: MegatronContext, logits: Tensor) -> Tensor:
    """The loss of every token, then their mean.

    TransformerEngine's kernel writes the gradient of the logits over them. Megatron's own widens them to
    fp32, where they become their softmax, and in backward their gradient, in one storage; the model's
    frame holds the 16-bit logits until the loss is there.
    """
    t = c.tape
    settings = c.settings
    rows = c.tokens
    losses = t.tensor(rows, DType.FP32)
    sends = _row_sums(c, losses)
    if settings.cross_entropy_loss_fusion and settings.cross_entropy_fusion_impl is LossFusion.TE:
        statistics = t.tensor(3 * rows, DType.FP32)
        t.record(
            OperationKind.CROSS_ENTROPY, (logits,), (losses, statistics), saves=(logits,),
            gradients=(Gradient.SAVED,), in_python=True, sends=sends,
        )  # fmt: skip
    else:
        full = t.cast(logits, DType.FP32)
        targets, others = t.tensor(rows, DType.INT64), t.tensor(rows, DType.BOOL)
        t.record(
            OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY, (full,), (losses, targets, others),
            saves=(full, targets, others), gradients=(Gradient.SAVED,), in_python=True,
            sends=sends,
        )  # fmt: skip
        t.touch(logits)
    if c.batch > 1:
        losses = t.contiguous(losses)
    loss = t.tensor(1, DType.FP32)
    t.record(OperationKind.MEAN, (losses,), (loss,), gradients=(Gradient.FRESH,))
    return loss


def _row_sums(c: MegatronContext, losses: Tensor) -> Sends:
    """Of every token the greatest logit, the target's, and the sum of exponentials, from all ranks."""
    if c.degree == 1:
        return NO_SENDS
    each = Send(ExchangeKind.ALL_REDUCE, losses.storage.num_bytes, Group.SPLIT)
    return Sends((each, each, each))
