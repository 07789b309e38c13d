"""What the batch brings to a model's towers: pictures, sound, numbers."""

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes


def sensed(t: Tape, numel: int, *, casts: bool = False) -> Tensor:
    """Pictures or sound of the batch: in fp32 where autocast, FSDP2's root or the class ``casts`` them, else in 16
    bits where the model is, which does not take others.
    """
    if t.options.casts_inputs:
        return t.cast(from_batch(t, numel, DType.FP32), t.compute)
    return from_batch(t, numel, DType.FP32 if casts or t.autocast is not None else t.compute)


def from_batch(t: Tape, numel: int, dtype: DType) -> Tensor:
    """A tensor of the batch, which is there before the step; counted with it."""
    storage = Storage(allocated_bytes(numel, dtype), -1, 0)
    t.inputs.append(storage.num_bytes)
    return Tensor(numel, dtype, storage)
