"""What a program sends, fetches and copies between its blocks: the events that step times are told from.

An engine says so where it does it, beside what it allocates for it. How long that takes, and what of it
computing hides, is for others to say (``memplan.compute``).
"""

from enum import Enum, StrEnum
from typing import NamedTuple


class ExchangeKind(StrEnum):
    """What moves; the value is what people read."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"
    TO_GPU = "host to GPU"
    TO_HOST = "GPU to host"
    TO_GPU_IN_TURN = "host to GPU, one GPU at a time"
    TO_HOST_IN_TURN = "GPU to host, one GPU at a time"
    """Alone on a link that GPUs share."""
    TO_GPU_PAGEABLE = "host to GPU, from pages that are not pinned"
    FROM_STORAGE = "reading from NVMe"
    TO_STORAGE = "writing to NVMe"
    HOST_UPDATE = "optimizer on the CPU"
    """Read and written in the CPU's memory."""
    COPY = "copies"
    """Read and written in the GPU's memory, by the engine."""
    UPDATE = "optimizer"
    """Read and written in the GPU's memory, by the optimizer."""


class Hiding(Enum):
    """What of it runs beside computing."""

    AHEAD = "ahead"
    """It is asked for one step ahead; what needs it waits until it is there."""
    BEHIND = "behind"
    """Nothing waits for it before the pass is over."""
    NONE = "none"
    """Computing waits."""

    # Members are their own only equals, and ledgers look them up all the time.
    __hash__ = object.__hash__


class Ranks(NamedTuple):
    """The ranks that take part: so many, each so far from the next one."""

    degree: int = 1
    stride: int = 1


ALONE = Ranks()


class Group(Enum):
    """Who sends to whom among the ranks of one copy of the model."""

    SPLIT = "layers split between them"
    SHARED = "sequences shared between them"
    SPREAD = "experts spread over them"
    EXPERT = "each expert split between them"


class Send(NamedTuple):
    """What an operation of a split model sends from within, in one of its passes."""

    kind: ExchangeKind
    num_bytes: int
    """Of a collective, the whole message."""
    group: Group
    beside: float = 0.0
    """Of the operation's own computing, the share that it runs beside."""


class Sends(NamedTuple):
    """The same of both passes."""

    forward: tuple[Send, ...] = ()
    backward: tuple[Send, ...] = ()


NO_SENDS = Sends()


def both_ways(kind: ExchangeKind, num_bytes: int, group: Group) -> Sends:
    """What goes there in forward comes back in backward."""
    sent = (Send(kind, num_bytes, group),)
    return Sends(sent, sent)


class Exchange(NamedTuple):
    """One kind of exchange in one pass."""

    segment: int
    """Where it is begun: the number of a segment; -1: beside them."""
    kind: ExchangeKind
    num_bytes: int
    """Of a collective, the whole message: what each rank has in the end, or had in the beginning. Of a
    copy or an update, all that is read and written."""
    ranks: Ranks
    hiding: Hiding


class Visit(NamedTuple):
    """A part of a step, and what was exchanged in it."""

    part: str
    """As the ledger calls it: ``forward``, ``backward``, ``step``."""
    exchanges: tuple[tuple[Exchange, int], ...]
    """Each, and how often."""
    number: int = -1
    """Of a pipeline, which pass of the step it is."""
