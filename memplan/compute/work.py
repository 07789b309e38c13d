"""What one pass over a segment takes, by what it waits for."""

from typing import NamedTuple

from memplan.training.splitting.exchange import ExchangeKind, Group


class Message(NamedTuple):
    """What the ranks of a split model send one another."""

    kind: ExchangeKind
    num_bytes: int
    group: Group = Group.SPLIT
    beside_s: float = 0.0
    """For so long it runs beside the operation's own computing [s]."""


class Work:
    """What one pass over a segment takes, by what it waits for [s]."""

    __slots__ = ("attention_s", "away_bytes", "host_s", "memory_s", "messages", "products_s")

    def __init__(self) -> None:
        self.products_s = 0.0
        self.attention_s = 0.0
        self.memory_s = 0.0
        """Reading and writing."""
        self.host_s = 0.0
        """Asking for the kernels, which runs ahead of them; on the CPU that prices were measured on."""
        self.messages: list[Message] = []
        self.away_bytes = 0
        """Activations that go to the host in forward, or come back in backward."""

    @property
    def device_s(self) -> float:
        """On the GPU, messages left out."""
        return self.products_s + self.attention_s + self.memory_s


class SegmentWork(NamedTuple):
    """One repetition of a segment."""

    forward: Work
    backward: Work
    again: Work
    """What is run again in backward."""
    num_weights: int = 0
    num_trained: int = 0
    is_unit: bool = False
    """A layer, which engines gather as one."""
