"""Selective checkpointing: what each policy keeps of a layer, and what it computes again."""

from memplan.graph.core.operation_kinds import ATTENTION_KERNELS, OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Region, Segment
from memplan.graph.core.tensors import Storage
from memplan.training.choices_of_kernels.kernels import SelectivePolicy


def keeps_every_other_matmul(options: TapeOptions) -> bool:
    """Whether layers are checkpointed whole, but for what torchtitan's policy keeps."""
    return options.selective and options.kernels.selective is SelectivePolicy.EVERY_OTHER_MATMUL


def recomputes_core_attention(options: TapeOptions) -> bool:
    """Whether only scores, softmax and dropout are computed again."""
    return options.selective and options.kernels.selective is SelectivePolicy.CORE_ATTENTION


def kept_outputs(segment: Segment) -> frozenset[Storage]:
    """Outputs of attention kernels, of reduce-scatters, and of the first, third, fifth ... linear layer.

    torchtitan 0.3.0, distributed/activation_checkpoint.py, ``SelectiveAC``: matrix products are
    counted from 1 within each layer, and those with an even number are recomputed.
    """
    found: set[Storage] = set()
    products = 0
    for operation in segment.operations:
        if operation.kind is OperationKind.LINEAR:
            products += 1
            if products % 2:
                found.update(tensor.storage for tensor in operation.outputs)
        elif operation.kind in ATTENTION_KERNELS or operation.kind is OperationKind.REDUCE_SCATTER:
            found.update(tensor.storage for tensor in operation.outputs)
    return frozenset(found)


def region_since(segment: Segment, start: int) -> Region:
    """The operations recorded since ``start``, to be recomputed on their own.

    Views of what was there before are none of what they make.
    """
    operations = segment.operations[start:]
    made = {tensor.storage for operation in operations for tensor in operation.outputs}
    made -= {tensor.storage for each in segment.operations[:start] for tensor in each.outputs}
    kept = {storage for operation in operations for storage in operation.saved}
    return Region(start, len(segment.operations), frozenset(made.difference(segment.given) & kept))
