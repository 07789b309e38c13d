"""What a program holds over a run, spot by spot, and the fullest moments of a batch laid under it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.ledger import Part
from memplan.memory.spots import Spot, Spots

if TYPE_CHECKING:
    from memplan.training.exchange import Visit

Held = tuple[int, ...]
"""What a program holds, by line."""
Point = tuple[int, int, Held]
"""A repetition, what the program holds in all, and by line."""


@dataclass(frozen=True, slots=True)
class Line:
    """Blocks of one purpose."""

    kind: ComponentKind
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The fullest moment of a part of a run."""

    total_bytes: int
    held: Held
    """By line, what the program holds."""
    spot: Spot
    repetition: int


class Outline:
    """What a program holds over a run, spot by spot; every batch of the same structure shares it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.points: dict[Part, dict[Spot, list[Point]]] = {}
        """The points that may be the fullest of their spot, whatever the model holds there."""
        self.held: dict[Part, Held] = {}
        """What is held when a part of the run ends."""
        self.visits: list[Visit] = []
        """What is exchanged in each part of a steady step, in order."""

    @property
    def held_bytes(self) -> int:
        """What the program holds between steps."""
        return sum(self.held[Part.STEP])

    def moments(self, spots: Spots, parts: Iterable[Part]) -> dict[Part, Moment]:
        """The fullest of each of these parts, if the run has it."""
        points = self.points
        return {part: _fullest(points[part], spots) for part in parts if points.get(part)}

    def entries(self, held: Held) -> list[Entry]:
        """What the program holds, by purpose."""
        return [
            Entry(line.kind, size, line.name)
            for line, size in zip(self.lines, held, strict=False)
            if size
        ]


def _fullest(points: dict[Spot, list[Point]], spots: Spots) -> Moment:
    lines = spots.lines
    best = -1
    found: tuple[Held, Spot, int] | None = None
    for spot, own in points.items():
        first, intercept, slope = lines[spot]
        for repetition, size, held in own:
            total = size + (intercept + repetition * slope if repetition else first)
            if total > best:
                best, found = total, (held, spot, repetition)
    assert found is not None
    held, spot, repetition = found
    return Moment(total_bytes=best, held=held, spot=spot, repetition=repetition)
