"""What the blocks of a model's towers hand on beside the hidden states."""

from dataclasses import field

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.masks import additive_mask, causal_pattern
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.training.choices_of_kernels.kernels import AttentionKernel


@dataclass(slots=True)
class Flow:
    """What the blocks of a model's towers hand on."""

    items: int
    """Pictures, clips or texts in the present tower's batch."""
    mask: Tensor | None = None
    """What a text tower's eager attention adds to its scores."""

    labels: Tensor | None = None
    """What the model should say."""
    shapes: Tensor | None = None
    """Which shape the tiles of each picture are laid out in."""
    length: int = 0
    """How long a clip's signal is here."""
    grid: tuple[int, int] = (0, 0)
    """Positions of a picture down and across."""
    pixels: Tensor | None = None
    """The pictures, as the batch brought them."""
    picture: tuple[int, int] = (0, 0)
    """Pixels of a picture down and across."""
    patches: int = 0
    """Of a picture."""
    tables: tuple[Tensor, Tensor] | None = None
    """Cosines and sines by which heads are turned."""
    shared: list[Tensor] = field(default_factory=list)
    """What the present tower's layers all read, and nothing behind them."""
    collected: list[Tensor] | None = None
    """What the first layer reads, and each layer's result but the last's, where they are collected."""
    named: list[Tensor] = field(default_factory=list)
    """What variables of the model's hold for a while."""
    returned: list[Tensor] = field(default_factory=list)
    """What the base model returns beside its result, which lives until the loss is there."""
    tapped: Tensor | None = None
    """What a layer in the middle of a tower gave, read again behind it."""
    memory: Tensor | None = None
    """What the tower gave that a decoder attends to."""

    def hold_mask(self, t: Tape, length: int) -> None:
        """Make what eager attention adds to a causal tower's scores."""
        self.mask = None
        if t.kernels.attention is AttentionKernel.EAGER:
            pattern = causal_pattern(t, self.items, length, length)
            self.mask = additive_mask(t, pattern, self.items, t.compute)
            self.share(t, self.mask)

    def hold_padding(self, t: Tape, items: int, rows: int) -> None:
        """Make what tells padding apart: a row for each item, seen by each query (``expand``)."""
        self.mask = None
        if t.kernels.attention.is_package:
            return
        seen = t.tensor(items * rows, DType.BOOL)
        t.record(OperationKind.EQ, (), (seen,))
        self.mask = Tensor(items * rows * rows, DType.BOOL, seen.storage)
        if t.kernels.attention is AttentionKernel.EAGER:
            self.mask = additive_mask(t, self.mask, 1, t.compute)
        self.share(t, self.mask)

    def share(self, t: Tape, tensor: Tensor) -> None:
        """Hold a tensor until the tower's layers are over."""
        t.hold(tensor)
        self.shared.append(tensor)

    def tokens(self, x: Tensor, size: int) -> int:
        """How many tokens each of them has."""
        return x.numel // size // self.items


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
