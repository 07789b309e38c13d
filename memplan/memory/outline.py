"""What a program holds over a run, spot by spot, and the fullest moments of a batch laid under it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.crowds import NOTHING, UNCROWDED, Crowd, Sizes
from memplan.memory.replaying.ledger import Part
from memplan.memory.spots import Spot, Spots

if TYPE_CHECKING:
    from memplan.training.splitting.exchange import Visit

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
    crowd: Crowd = NOTHING
    """What is beside it."""


@dataclass(slots=True)
class Visits:
    """Visits to a part of a run in which a program does the same."""

    groups: set[int]
    """Of what may be beside them."""
    points: dict[Spot, list[Point]]
    """The points that may be the fullest of their spot, whatever the model holds there."""
    most_bytes: int = 0
    """No point is higher."""
    spots: Sequence[tuple[Spot, int, list[Point]]] = ()
    """Each spot with its highest point, and all of them."""

    def close(self) -> None:
        """Nothing is added any more."""
        self.spots = [
            (spot, max(size for _, size, _ in own), own) for spot, own in self.points.items()
        ]
        self.most_bytes = max(most for _, most, _ in self.spots)


NO_CROWD = 0
"""The group of what is nothing."""
_NO_CROWDS: Sequence[Sequence[Crowd]] = ((NOTHING,),)
_UNCROWDED: Sequence[tuple[int, Crowd]] = ((0, NOTHING),)
"""What is beside the passes of a run beside whose passes nothing is."""


class Outline:
    """What a program holds over a run, spot by spot; every batch of the same structure shares it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.points: dict[Part, list[Visits]] = {}
        self.crowds: Sequence[Sequence[Crowd]] = _NO_CROWDS
        """By group, what may be beside a visit: one of these."""
        self.rest_group = NO_CROWD
        """The group of what is there between steps."""
        self.held: dict[Part, Held] = {}
        """What is held when a part of the run ends."""
        self.visits: list[Visit] = []
        """What is exchanged in each part of a steady step, in order."""
        self._entries: dict[Held, tuple[Entry, ...]] = {}

    def held_bytes(self, sizes: Sizes) -> int:
        """What is held between steps."""
        return sum(self.held[Part.STEP]) + sizes.largest(self.crowds[self.rest_group])[0]

    def moments(
        self, spots: Spots, parts: Iterable[Part], sizes: Sizes = UNCROWDED, *, above: int = -1
    ) -> dict[Part, Moment]:
        """The fullest of each of these parts, if the run has it and it holds more than ``above`` [bytes]."""
        points = self.points
        beside = _UNCROWDED
        if self.crowds is not _NO_CROWDS:
            beside = [sizes.largest(each) for each in self.crowds]
        found = {}
        for part in parts:
            if visits := points.get(part):
                moment = _fullest(visits, spots, beside, above)
                if moment is not None:
                    found[part] = moment
        return found

    def entries(self, held: Held) -> tuple[Entry, ...]:
        """What the program holds, by purpose; remembered, since batches share their fullest moments."""
        found = self._entries.get(held)
        if found is None:
            found = self._entries[held] = tuple(
                Entry(line.kind, size, line.name)
                for line, size in zip(self.lines, held, strict=False)
                if size
            )
        return found


def _fullest(
    visits: list[Visits], spots: Spots, beside: Sequence[tuple[int, Crowd]], above: int
) -> Moment | None:
    """The fullest moment of these visits; None where none holds more than ``above``.

    Of equally full ones the first.
    """
    lines, heights = spots.lines, spots.heights
    best = above
    found: tuple[Held, Spot, int, Crowd] | None = None
    for each in visits:
        if len(each.groups) == 1:
            (group,) = each.groups
            level, crowd = beside[group]
        else:
            level, crowd = max([beside[group] for group in each.groups], key=_level)
        if level + each.most_bytes + spots.highest_bytes <= best:
            continue
        for spot, most, own in each.spots:
            if level + most + heights[spot] <= best:
                continue
            first, intercept, slope = lines[spot]
            for repetition, size, held in own:
                total = level + size + (intercept + repetition * slope if repetition else first)
                if total > best:
                    best, found = total, (held, spot, repetition, crowd)
    if found is None:
        return None
    held, spot, repetition, crowd = found
    return Moment(total_bytes=best, held=held, spot=spot, repetition=repetition, crowd=crowd)


def _level(beside: tuple[int, Crowd]) -> int:
    return beside[0]
