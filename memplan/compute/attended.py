"""How long a kernel of attention takes: by its kind, its keys, its heads, and what is added to its scores."""

from memplan.compute.flops import attention_factor, causal_share
from memplan.compute.rates import Rates
from memplan.compute.traffic import made_bytes, read_bytes
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.training.splitting.context_parallel import ContextParallelKind

HALF_LENGTHS = {True: (500, 1100), False: (150, 450)}
"""Keys at which attention's kernels reach half of their rate forward and backward, with a causal mask, which
cuts tiles, and without (``tests/measured/h100_rates.json``)."""
FULL_HEAD = 128
SINGLE_ATTENTION_SHARE = 1 / 6
"""Of its rate in 16 bits, what a kernel reaches in fp32: three products in TF32, each half as fast."""
ADDED_SHARES = {
    (True, False): (0.72, 0.92), (True, True): (0.69, 0.81),
    (False, False): (0.86, 0.97), (False, True): (0.78, 0.86),
}  # fmt: skip
"""Of its rate, what the memory-efficient kernel reaches forward and backward where a mask is added to the scores,
in 16 bits or not, and the mask trained or not (``efficient`` of ``tests/measured/kernels.json``)."""
KERNEL_RECOMPUTATION = 0.5
"""Of the forward pass, what attention's kernels compute again in backward: the scores."""


class AttentionTimes:
    """Of one segment's kernels."""

    def __init__(self, tape: Tape, segment: Segment, model: ModelSpec, rates: Rates) -> None:
        self.tape = tape
        self.rates = rates
        self.share = float(causal_share(segment.layer, tape, model))
        """Of the scores, what is computed."""
        spec = segment.layer.attention if segment.layer is not None else None
        self.head = spec.head_dim if isinstance(spec, AttentionSpec) else FULL_HEAD

    def seconds(self, operation: Operation, direction: int) -> float:
        """Forward (0) or backward (1) [s]."""
        flops = operation.flops * self.share
        if direction:
            flops *= _backward_factor(operation)
        seconds = flops / self._reached(operation, direction)
        moved = (read_bytes(operation) + made_bytes(operation)) * (1 + direction)
        return max(seconds, moved / self.rates.bytes_per_s) + self.rates.kernel_s

    def _reached(self, operation: Operation, direction: int) -> float:
        """At its keys and heads [FLOP/s]."""
        third = self.tape.kernels.attention is AttentionKernel.FLASH3
        found = self.rates.third_flash if third else self.rates.attention[operation.kind]
        query = operation.inputs[0]
        length = self._keys(operation, query)
        half_length = HALF_LENGTHS[self.share < 1][direction]
        reached = (found.backward if direction else found.forward) * length / (length + half_length)
        if self.head < FULL_HEAD:
            reached *= found.half_head ** (FULL_HEAD / self.head - 1)
        if not query.dtype.is_half:
            reached *= SINGLE_ATTENTION_SHARE
        if operation.kind is OperationKind.EFFICIENT_ATTENTION and len(operation.inputs) > 3:
            trained = operation.inputs[3].requires_grad
            reached *= ADDED_SHARES[query.dtype.is_half, trained][direction]
        return reached

    def _keys(self, operation: Operation, query: Tensor) -> float:
        """Keys to a query in one kernel, by the FLOPs of both products; a ring has a kernel for each rank's."""
        keys = operation.flops / (2 * (query.numel + operation.outputs[0].numel))
        shared = self.tape.options.context_parallel
        if shared is None or shared.kind is not ContextParallelKind.RING:
            return keys
        return keys / shared.degree


def _backward_factor(operation: Operation) -> float:
    """Backward over forward of an attention kernel."""
    needed = [each.requires_grad for each in operation.inputs]
    if len(needed) < 3:
        needed.append(needed[-1])  # keys and values in one
        return 2.0 * all(needed) + KERNEL_RECOMPUTATION
    return float(attention_factor(operation, needed)) + KERNEL_RECOMPUTATION
