"""What the blocks of a model's towers hand on beside the hidden states."""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.tape import Tape
from memplan.graph.tensors import Storage, Tensor, allocated_bytes


@dataclass(slots=True)
class Flow:
    """What the blocks of a model's towers hand on."""

    items: int
    """Pictures, clips or texts in the present tower's batch."""
    ids: Tensor | None = None
    """A text's token ids."""
    mask: Tensor | None = None
    """What a text tower's eager attention adds to its scores."""

    def tokens(self, x: Tensor, size: int) -> int:
        """How many tokens each of them has."""
        return x.numel // size // self.items


def from_batch(t: Tape, numel: int, dtype: DType) -> Tensor:
    """A tensor of the batch, which is there before the step; counted with it."""
    storage = Storage(allocated_bytes(numel, dtype), -1, 0)
    t.inputs_bytes += storage.num_bytes
    return Tensor(numel, dtype, storage)
