"""What the engine adds to a backward pass, recorded once and laid over many.

Which gradients wait, which buckets are full and what is gathered depends on the parameters, the
ranks and the engine's settings, not on micro-batch and sequence length: those only move the levels
that it is added to. So a replay is run once for each combination of the former, with a ``Recording``
in place of its ``Peak``, and its offers are weighed against each walk's levels. Equal layers sink by
the same step from one repetition to the next, so of the offers made at the same place of each, only
those on the upper hull (bytes over repetition) can ever be the highest.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from memplan.memory.deepspeed.partition import ModelWeights
from memplan.memory.deepspeed.peak import EngineBytes, Peak
from memplan.memory.deepspeed.timeline import BackwardTimeline, Moment
from memplan.memory.step import Height

REMEMBERED = 128
"""Recordings that are kept: more than a sweep meets between two of the same kind."""


Value = TypeVar("Value")


class Keyed(Generic[Value]):
    """A value that goes by another object, or by itself: what a result is remembered under.

    Only what the key stands for may decide the result.
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Value, key: object = None) -> None:
        self.value = value
        self.key = value if key is None else key

    def __hash__(self) -> int:
        return id(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and other.key is self.key


class Shape:
    """What a replay depends on beside the engine: equal shapes are one object."""

    __slots__ = ("numels", "trainable")

    def __init__(self, numels: tuple[int, ...], trainable: tuple[bool, ...]) -> None:
        self.numels = numels
        """Elements of each parameter [elements]."""
        self.trainable = trainable


@lru_cache(maxsize=REMEMBERED)
def _shape(
    numels: tuple[int, ...], trainable: tuple[bool, ...], moments: tuple[tuple[int, ...], ...]
) -> Shape:
    del moments  # part of the key alone
    return Shape(numels, trainable)


def shape_of(weights: ModelWeights, timeline: BackwardTimeline) -> Shape:
    """The shape of a backward pass: its parameters, and all of its moments but their levels."""
    return _shape(
        tuple(weights.numels),
        tuple(weights.trainable),
        tuple(moment[3:] for moment in timeline.moments),
    )


class Offer(NamedTuple):
    """What the engine holds at one end of a moment."""

    number: int
    """Of the moment."""
    at_end: bool
    gradients: int
    buckets: int
    temporaries: int
    gathered: int
    rank: int = 0
    """Of several ranks that are replayed at once, the one that holds most there."""

    @property
    def engine_bytes(self) -> int:
        """All of it."""
        return self.gradients + self.buckets + self.temporaries + self.gathered


class Recording(Peak):
    """Takes a replay's offers instead of weighing them."""

    def __init__(self, timeline: BackwardTimeline) -> None:
        super().__init__()
        self._numbers = {id(moment): index for index, moment in enumerate(timeline.moments)}
        self.offers: list[Offer] = []

    def offer(
        self,
        level_bytes: int,  # noqa: ARG002  (that of the moment: another one in every walk)
        *,
        gradients: int = 0,
        buckets: int = 0,
        temporaries: int = 0,
        gathered: int = 0,
        moment: Moment | None = None,
        at_end: bool = False,
        height: Height | None = None,  # noqa: ARG002
        rank: int = 0,
    ) -> None:
        """Note an offer, which has to be at the peak or the end of a moment."""
        number = self._numbers[id(moment)]
        self.offers.append(Offer(number, at_end, gradients, buckets, temporaries, gathered, rank))


def candidates(recording: Recording, timeline: BackwardTimeline) -> tuple[Offer, ...]:
    """The offers that can be the highest, in the order they were made."""
    groups: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = {}
    for order, offer in enumerate(recording.offers):
        moment = timeline.moments[offer.number]
        place = (moment.place, moment.interval, offer.at_end)
        point = (moment.repetition, offer.engine_bytes, order)
        groups.setdefault(place, []).append(point)
    kept = sorted(order for points in groups.values() for _, _, order in upper_hull(points))
    return tuple(recording.offers[order] for order in kept)


Point = tuple[int, int, int]
"""Repetition, bytes, and what they belong to."""


def upper_hull(points: Iterable[Point]) -> list[Point]:
    """The points that are the highest of all under some slope; of equals, the first.

    A straight line of any slope added to the bytes leaves its highest point among them.

    >>> [repetition for repetition, _, _ in upper_hull([(0, 5, 0), (1, 5, 1), (2, 7, 2), (3, 0, 3)])]
    [0, 2, 3]
    """
    highest: dict[int, Point] = {}
    for point in points:
        known = highest.get(point[0])
        if known is None or point[1] > known[1]:
            highest[point[0]] = point
    hull: list[Point] = []
    for point in sorted(highest.values()):
        while len(hull) > 1 and not _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: Point, middle: Point, last: Point) -> bool:
    """Whether the middle point lies above the line between the other two."""
    rise = (middle[1] - first[1]) * (last[0] - first[0])
    return rise > (last[1] - first[1]) * (middle[0] - first[0])


def highest(offers: Sequence[Offer], timeline: BackwardTimeline) -> Peak:
    """Weigh offers against a walk's levels; of equals, the first."""
    moments = timeline.moments
    best = -1
    chosen = offers[0]
    for offer in offers:
        moment = moments[offer[0]]
        total = moment[1 if offer[1] else 0] + offer[2] + offer[3] + offer[4] + offer[5]
        if total > best:
            best, chosen = total, offer
    peak = Peak()
    peak.total_bytes = best
    peak.moment = moments[chosen.number]
    peak.at_end = chosen.at_end
    peak.rank = chosen.rank
    peak.engine = EngineBytes(chosen.gradients, chosen.buckets, chosen.temporaries, chosen.gathered)
    return peak
