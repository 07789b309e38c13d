"""How ranks share each sequence, as data."""

from enum import Enum

from memplan.fast_dataclass import dataclass


class ContextParallelKind(Enum):
    """How attention sees the tokens of the other ranks."""

    RING = "ring"
    """Each rank keeps its queries, and keys and values go round (torch 2.13,
    ``torch.distributed.tensor.experimental.context_parallel``; accelerate's ``cp_size``)."""
    ALL_TO_ALL = "all-to-all"
    """Each rank has some heads of the whole sequence meanwhile: DeepSpeed-Ulysses, accelerate's
    ``sp_size``."""


class RotateMethod(Enum):
    """How keys and values of a ring get about (torch's ``set_rotate_method``)."""

    ALLGATHER = "allgather"
    """Those of all ranks are gathered at once."""
    ALLTOALL = "alltoall"
    """From rank to rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """Sequences shared by the ranks of a group.

    >>> ContextParallel(degree=4, kind=ContextParallelKind.RING).words
    'each sequence shared by 4 ranks (ring attention, keys and values all gathered)'
    """

    degree: int
    """Ranks that share each sequence."""
    kind: ContextParallelKind
    rotate_method: RotateMethod = RotateMethod.ALLGATHER
    """In a ring."""
    in_classes: bool = False
    """The model's own layers see to it, windows and recurrent states too: then attention alone is followed as ``kind`` says."""

    @property
    def place(self) -> int:
        """The rank of a ring that is looked at: one that holds most.

        Ranks behind the first merge whole queries, those before the last merge halves, whose result
        lies head by head and is copied: the last but one does both.
        """
        return max(0, self.degree - 2)

    @property
    def words(self) -> str:
        """What people read of it."""
        gathers = self.rotate_method is RotateMethod.ALLGATHER
        rotated = "all gathered" if gathers else "sent from rank to rank"
        how = {
            ContextParallelKind.RING: f"ring attention, keys and values {rotated}",
            ContextParallelKind.ALL_TO_ALL: "Ulysses, all-to-all to heads and back",
        }[self.kind]
        how += ", by the model's own classes" * self.in_classes
        return f"each sequence shared by {self.degree} ranks ({how})"
