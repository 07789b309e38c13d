"""How a model is split over ranks, as data."""

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Heads, networks and vocabulary split over the ranks of a group (torch's DTensor).

    >>> TensorParallel(degree=4, sequence=True).words
    'tensor parallel over 4 ranks (DTensor) with sequence parallel'
    """

    degree: int
    """Ranks over which each split weight is spread."""
    sequence: bool = False
    """Between the split blocks each rank has a share of every sequence (``SequenceParallel``)."""
    loss: bool = False
    """The logits stay split over the vocabulary (``loss_parallel``)."""

    @property
    def words(self) -> str:
        """What people read of it."""
        beside = [
            name
            for name, chosen in (("sequence parallel", self.sequence), ("loss parallel", self.loss))
            if chosen
        ]
        return f"tensor parallel over {self.degree} ranks (DTensor)" + (
            f" with {' and '.join(beside)}" if beside else ""
        )
