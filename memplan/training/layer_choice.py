"""Layers that are checkpointed, by their numbers."""

import re

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass

_PART = re.compile(r"(?:layers\.)?(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class CheckpointedLayers:
    """Layers, counted from 0 in each stack; the others keep their activations.

    >>> CheckpointedLayers.parse("0-3,12")
    CheckpointedLayers(ranges=((0, 3), (12, 12)))
    """

    ranges: tuple[tuple[int, int], ...]
    """First and last number of each stretch, in order, none touching the next."""

    @classmethod
    def first(cls, count: int) -> "CheckpointedLayers":
        """As many layers, from the first on, as torchtitan counts them."""
        return cls(((0, count - 1),))

    @classmethod
    def parse(cls, text: str) -> "CheckpointedLayers":
        """Read ``0-3,12`` or ``layers.0-3+layers.12``; ``+`` for where commas part values.

        Raises ``SetupError`` for what names no layers.
        """
        numbers: set[int] = set()
        for part in re.split(r"[,+]", text):
            match = _PART.fullmatch(part.strip())
            low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if low > high or high >= MAX_LAYERS:
                msg = f"checkpointing: cannot read the layers in {part.strip()!r}; write 0-7 or 3"
                raise SetupError(msg)
            numbers.update(range(low, high + 1))
        return cls(tuple(_stretches(sorted(numbers))))

    def __contains__(self, index: int) -> bool:
        return any(first <= index <= last for first, last in self.ranges)

    @property
    def last(self) -> int:
        """The highest number."""
        return self.ranges[-1][1]

    def share(self, num_layers: int) -> float:
        """Of the layers of a model."""
        count = sum(min(last, num_layers - 1) - first + 1 for first, last in self.ranges)
        return count / num_layers

    def __str__(self) -> str:
        parts = (f"{low}-{high}" if low < high else str(low) for low, high in self.ranges)
        return "layers." + "+".join(parts)


MAX_LAYERS = 100_000
"""No model has as many."""


def _stretches(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
