"""A pool as data: cards of one kind that a platform lets jobs have."""

from memplan.errors import InputError
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec

USUAL_GPUS_PER_NODE = 8
"""Of a node that nobody describes, as ``TrainingSetup`` takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One of a platform's pools.

    Raises ``InputError`` for numbers that no pool has.
    """

    name: str
    gpu: GpuSpec
    num_gpus: int
    """Of all its nodes."""
    gpus_per_node: int = USUAL_GPUS_PER_NODE
    quota: int | None = None
    """The most of them that one job may have; None: all."""
    price: float | None = None
    """Of one GPU's hour, in whatever money; None: not known."""
    node_memory_bytes: int | None = None
    """CPU RAM of one node; None: not known [bytes]."""
    queue: str = ""
    """What its scheduler calls it: Slurm's partition, Kueue's queue."""
    scheduler: str = ""
    """Which kind of file asks for it, as ``--emit`` names it; nothing: not said."""

    def __post_init__(self) -> None:
        for key in ("num_gpus", "gpus_per_node", "quota"):
            value = getattr(self, key)
            if value is not None and value < 1:
                msg = f"{self.name}: {key} must be at least 1, got {value}"
                raise InputError(msg)
        if self.price is not None and not 0 <= self.price < float("inf"):
            msg = f"{self.name}: a price must not be below 0, got {self.price}"
            raise InputError(msg)

    @property
    def usable_gpus(self) -> int:
        """The most that one job may have.

        >>> from memplan.sources.cards.catalog import load_gpu
        >>> Pool(name="a", gpu=load_gpu("t4"), num_gpus=16, quota=4).usable_gpus
        4
        """
        return self.num_gpus if self.quota is None else min(self.num_gpus, self.quota)

    def num_nodes(self, num_gpus: int) -> int:
        """Nodes that so many of its GPUs are on.

        >>> from memplan.sources.cards.catalog import load_gpu
        >>> Pool(name="a", gpu=load_gpu("t4"), num_gpus=16, gpus_per_node=4).num_nodes(6)
        2
        """
        return -(-num_gpus // self.gpus_per_node)

    def shortage(self, num_gpus: int) -> str:
        """Why it has not so many for one job; nothing where it has."""
        if num_gpus > self.num_gpus:
            return f"has {self.num_gpus} GPUs of the {num_gpus} that are asked for"
        if num_gpus > self.usable_gpus:
            return f"lets a job have {self.usable_gpus} of its GPUs, and {num_gpus} are asked for"
        return ""
