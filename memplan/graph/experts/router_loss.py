"""The load-balancing loss of mixtures of experts (``load_balancing_loss_func``).

With ``output_router_logits`` the model keeps every layer's router logits until the forward pass is
over, and the loss keeps a softmax of each. Both are written down in the head, for all layers at
once; the gradients that the logits get from it, as large as the softmaxes, are left out.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape


def keep_router_logits(
    t: Tape, experts: int, *, in_fp32: bool = False, scored: bool = True
) -> None:
    """The logits of some layers' routers, of so many experts together, and where a loss has its scores a
    softmax of each.

    Classes without such a loss keep and return them all the same (``OutputRecorder``).
    """
    tokens = t.options.batch_size * t.options.seq_len
    dtype = DType.FP32 if in_fp32 else t.autocast or t.compute
    logits = t.tensor(tokens * experts, dtype)
    logits.requires_grad = True
    t.record(OperationKind.ROUTER_LOGITS, (), (logits,))
    t.linger(logits)
    if not scored:
        return
    scores = t.tensor(logits.numel, DType.FP32 if t.autocast is not None else logits.dtype)
    t.record(
        OperationKind.SOFTMAX, (logits,), (scores,), saves=(scores,), gradients=(Gradient.NONE,)
    )
