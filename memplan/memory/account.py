"""The account of a training step: phases, and in each the bytes alive at its own peak."""

from collections.abc import Iterable
from enum import Enum

from memplan.fast_dataclass import dataclass


class Lifetime(Enum):
    """How long something is held."""

    LONG = "long"
    """The whole run."""
    MEDIUM = "medium"
    """From the forward to the backward pass."""
    SHORT = "short"
    """Inside an operation, or between two."""


class ComponentKind(Enum):
    """What bytes are for; the value is ``(name in reports, lifetime)``."""

    PARAMETERS = ("parameters", Lifetime.LONG)
    GRADIENTS = ("gradients", Lifetime.LONG)
    MASTER_WEIGHTS = ("master_weights", Lifetime.LONG)
    OPTIMIZER_STATES = ("optimizer_states", Lifetime.LONG)
    OTHER_MODELS = ("other_models", Lifetime.LONG)
    """Models beside the trained one: reference, teacher, critic, reward."""
    AVERAGED_WEIGHTS = ("averaged_weights", Lifetime.LONG)
    """An exponential average of the weights."""
    ROLLOUT_ENGINE = ("rollout_engine", Lifetime.LONG)
    """A colocated engine's share of the card, or a cache of keys and values."""
    BUFFERS = ("buffers", Lifetime.LONG)
    """Tables that the model keeps beside its weights: masks, positions."""
    INPUTS = ("inputs", Lifetime.LONG)
    """Token ids and labels."""
    ACTIVATIONS = ("activations", Lifetime.MEDIUM)
    LOGITS_AND_LOSS = ("logits_and_loss", Lifetime.MEDIUM)
    GATHERED_PARAMETERS = ("gathered_parameters", Lifetime.SHORT)
    COMMUNICATION_BUFFERS = ("communication_buffers", Lifetime.SHORT)
    TEMPORARIES = ("temporaries", Lifetime.SHORT)
    KERNEL_SCRATCH = ("kernel_scratch", Lifetime.SHORT)
    """cuBLAS workspaces."""

    # Members are their own only equals, and ledgers look them up all the time.
    __hash__ = object.__hash__

    def __init__(self, label: str, lifetime: Lifetime) -> None:
        self.label = label
        self.lifetime = lifetime


COMPONENT_LABELS: tuple[str, ...] = tuple(kind.label for kind in ComponentKind)
"""Names of all components, in the order reports show them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One component at one moment."""

    kind: ComponentKind
    num_bytes: int
    origin: str = ""
    """Where the figure comes from, in one line."""


class _Summed:
    """What is asked for its sum again and again: it is found once and kept."""

    __slots__ = ("_peak_bytes",)
    _peak_bytes: int


@dataclass(frozen=True, slots=True)
class Phase(_Summed):
    """One phase of a step, at its own peak."""

    name: str
    """``load``, ``first step``, ``generation``, ``forward``, ``backward``, ``step``, ``evaluation`` or
    ``save``."""
    entries: tuple[Entry, ...]

    @property
    def peak_bytes(self) -> int:
        """The sum of its components."""
        try:
            return self._peak_bytes
        except AttributeError:
            found = sum([entry.num_bytes for entry in self.entries])
            object.__setattr__(self, "_peak_bytes", found)
            return found

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component, those of one kind added up."""
        found: dict[str, int] = {}
        for entry in self.entries:
            label = entry.kind.label
            found[label] = found.get(label, 0) + entry.num_bytes
        return found


def make_phase(name: str, entries: Iterable[Entry]) -> Phase:
    """A phase without the components that hold nothing.

    >>> make_phase("load", [Entry(ComponentKind.PARAMETERS, 8), Entry(ComponentKind.INPUTS, 0)])
    ... # doctest: +ELLIPSIS
    Phase(name='load', entries=(Entry(kind=<ComponentKind.PARAMETERS...>, num_bytes=8, origin=''),))
    """
    kept = []
    for entry in entries:
        assert entry.num_bytes >= 0, f"{name}: {entry.kind.label} is negative"
        if entry.num_bytes:
            kept.append(entry)
    return Phase(name, tuple(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """CPU RAM that one rank needs."""

    held_bytes: int = 0
    """Between steps, once the optimizer has run."""
    load_bytes: int = 0
    """While the model is loaded and the engine set up."""
    save_bytes: int = 0
    """While a checkpoint is written, what is held included."""
    writer_bytes: int = 0
    """How much more that is on the first rank, which writes for all, than on the others."""
    pinned_bytes: int = 0
    """What of ``held_bytes`` is page-locked."""

    @property
    def peak_bytes(self) -> int:
        """The largest of them."""
        return max(self.held_bytes, self.load_bytes, self.save_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAccount:
    """Everything one rank holds, phase by phase."""

    rank: int = 0
    """The rank it was made for."""
    ranks: tuple[range, ...] = ()
    """Where all ranks were asked for, those that hold exactly this, in runs; else empty."""
    phases: tuple[Phase, ...]
    """In the order in which they happen; ``load`` first, ``save`` last where there are any. There is a
    ``first step`` where it is fuller than all later ones."""
    held_bytes: int
    """Between steps, once optimizer states exist."""
    host: HostMemory = HostMemory()
    left_out: tuple[str, ...] = ()
    """What this account does not hold, in words; a row that leaves something out never fits."""
    unsaved: tuple[str, ...] = ()
    """Settings that save memory and are not modelled, in words: the figures are upper bounds."""

    def node_bytes(self, num_ranks: int) -> int:
        """CPU RAM of the first node, whose ranks all hold what this one does, but for writing."""
        host = self.host
        saving = host.save_bytes - (host.writer_bytes if self.rank == 0 else 0)
        each = max(host.held_bytes, host.load_bytes, saving)
        return max(num_ranks * each, num_ranks * saving + host.writer_bytes)

    @property
    def num_ranks(self) -> int:
        """How many ranks it stands for, where all were asked for."""
        return sum(map(len, self.ranks))

    def is_of(self, rank: int) -> bool:
        """Whether this is what a rank holds, as far as ranks were compared."""
        return rank == self.rank or any(rank in run for run in self.ranks)

    @property
    def peak(self) -> Phase:
        """The fullest phase of the training step."""
        steps = [phase for phase in self.phases if phase.name in STEP_PHASES]
        return max(steps, key=lambda phase: phase.peak_bytes)


STEP_PHASES = ("generation", "forward", "backward", "step")
"""The phases that ``peak_bytes`` is taken over."""
