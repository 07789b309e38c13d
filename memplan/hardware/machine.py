"""A machine as one job sees it: its cards, who has how much of them, its memory and packages. Data; ``memplan.sources.machine`` looks."""

from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import Vendor


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupant:
    """A process that has memory of a card."""

    pid: int
    name: str
    """Its program, without its folder; empty where the driver does not say."""
    used_bytes: int | None = None
    """None where the driver does not say, as under Windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCard:
    """One card, or one slice of a card."""

    index: int
    """As the driver's tools count: by the slot, slices after one another."""
    name: str
    """As the driver prints it."""
    vendor: Vendor
    total_bytes: int
    """As ``nvidia-smi`` prints it."""
    used_bytes: int
    """By all processes, without what the driver keeps for itself."""
    uuid: str = ""
    driver: str = ""
    """The driver's version."""
    parent: str = ""
    """The name of the whole card; empty unless this is a slice of one (MIG)."""
    num_multiprocessors: int | None = None
    """Of a slice; None: not said."""
    occupants: tuple[Occupant, ...] = ()

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice of a card."""
        return bool(self.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardsHere:
    """What was found."""

    cards: tuple[LocalCard, ...]
    """Those that a job sees."""
    hidden: tuple[LocalCard, ...] = ()
    """Those that a variable hides from it."""
    hidden_by: str = ""
    """That variable."""
    trouble: str = ""
    """Why a tool that is there told of none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine, as one job sees it; None: not said."""

    memory_bytes: int | None
    """CPU RAM."""
    limit_bytes: int | None
    """What this process's group may have of it; None: all."""
    num_cores: int
    """Processors that this process may run on."""
    shared_bytes: int | None
    """``/dev/shm``, through which data loaders hand over batches and NCCL speaks within a node."""
    disk_bytes: int | None
    """Room where checkpoints would go: in the folder that memplan was started in."""

    @property
    def usable_bytes(self) -> int | None:
        """CPU RAM that a job can have."""
        known = [each for each in (self.memory_bytes, self.limit_bytes) if each is not None]
        return min(known, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPackage:
    """One package as it was found."""

    name: str
    version: str
    """Empty: not installed."""
