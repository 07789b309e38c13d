"""How a model is split over ranks, as data."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class TensorParallelKind(Enum):
    """Whose split it is; the value is what people read."""

    DTENSOR = "DTensor"
    """torch's: inputs are kept as they were gathered."""
    MEGATRON = "Megatron"
    """Megatron's: shares are kept, and gathered into one buffer again; the loss is always split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Heads, networks and vocabulary split over the ranks of a group.

    >>> TensorParallel(degree=4, sequence=True).words
    'tensor parallel over 4 ranks (DTensor) with sequence parallel'
    """

    degree: int
    """Ranks over which each split weight is spread."""
    sequence: bool = False
    """Between the split blocks each rank has a share of every sequence (``SequenceParallel``)."""
    loss: bool = False
    """The logits stay split over the vocabulary (``loss_parallel``)."""
    kind: TensorParallelKind = TensorParallelKind.DTENSOR
    """Whose it is."""

    @property
    def words(self) -> str:
        """What people read of it."""
        beside = [
            name
            for name, chosen in (("sequence parallel", self.sequence), ("loss parallel", self.loss))
            if chosen
        ]
        return f"tensor parallel over {self.degree} ranks ({self.kind.value})" + (
            f" with {' and '.join(beside)}" if beside else ""
        )
