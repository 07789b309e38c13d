"""The model's parameters one by one, and how ZeRO deals them to the ranks.

Parameters stand in the order of ``model.parameters()``, by which the flat buffer is cut
(``memplan.graph.declaration``).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from memplan.graph.declaration import declared_parameters
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter
from memplan.records import dataclass


@dataclass(frozen=True, slots=True)
class SegmentWeights:
    """Where a segment's parameters stand among all of them."""

    first: int
    """The number of its first parameter, in its first repetition."""
    stride: int
    """Parameters of one repetition."""
    positions: dict[Parameter, int]
    """Of each parameter within its repetition."""


class _Part:
    """Where a segment's parameters stand, while they are dealt out."""

    __slots__ = ("places", "stride")

    def __init__(self) -> None:
        self.places: dict[Parameter, int] = {}
        self.stride = 0

    def as_segment_weights(self) -> SegmentWeights:
        """The same, from the first of them on."""
        first = min(self.places.values(), default=0)
        positions = {each: place - first for each, place in self.places.items()}
        return SegmentWeights(first, self.stride, positions)


class ModelWeights:
    """Every parameter of the model, repetitions written out."""

    def __init__(self, tape: Tape) -> None:
        self.numels: list[int] = []
        """Elements of each [elements]."""
        self.trainable: list[bool] = []
        self.owners: dict[Parameter, int] = {}
        """The number of each parameter of the tape, in its segment's first repetition."""
        parts: dict[int, _Part] = {}
        for segment, parameters in declared_parameters(tape):
            part = parts.setdefault(segment.index, _Part())
            first, stride = len(self.numels), len(parameters)
            part.stride = stride
            for position, each in enumerate(parameters):
                part.places[each] = first + position
            self.owners.update(part.places)
            self.numels += [each.numel for each in parameters] * segment.num_copies
            self.trainable += [each.requires_grad for each in parameters] * segment.num_copies
        self.segments = [
            parts.get(segment.index, _Part()).as_segment_weights() for segment in tape.segments
        ]

    @cached_property
    def trained_numels(self) -> list[int]:
        """Elements of the parameters that are trained."""
        return [count for count, kept in zip(self.numels, self.trainable, strict=True) if kept]

    @cached_property
    def num_trained(self) -> int:
        """Elements that the optimizer updates."""
        return sum(self.trained_numels)

    @cached_property
    def num_frozen(self) -> int:
        """Elements that it does not."""
        return sum(self.numels) - self.num_trained

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest trained parameter."""
        return max(self.trained_numels, default=0)


class Numels(Protocol):
    """Parameters, as far as cutting them goes."""

    @property
    def numels(self) -> Sequence[int]:
        """Elements of each [elements]."""

    @property
    def trainable(self) -> Sequence[bool]:
        """Whether each is trained."""


class FlatPartition:
    """Stages 1 and 2: one flat buffer, cut into equal parts (stage_1_and_2.py, ``__init__``).

    The buffer is padded to two elements for each rank, so that every part starts at 4 bytes.
    """

    def __init__(self, weights: Numels, *, num_ranks: int, rank: int, round_robin: bool) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        alignment = 2 * num_ranks
        pairs = zip(weights.numels, weights.trainable, strict=True)
        num_trained = sum(count for count, kept in pairs if kept)
        self.numel = -(-num_trained // alignment) * alignment
        """Elements of the padded buffer."""
        self.size = self.numel // num_ranks
        """Elements of one rank's part."""
        trained = [index for index, kept in enumerate(weights.trainable) if kept]
        if round_robin:
            trained = deal_round_robin(trained, num_ranks)
        self.order = trained
        """The parameters' numbers in the order of the buffer."""
        self.first_rank = [-1] * len(weights.numels)
        """Whose part each parameter begins in; -1 where it is not trained."""
        self.last_rank = [-1] * len(weights.numels)
        """Whose part it ends in."""
        self.offsets = [0] * len(weights.numels)
        self.numels = weights.numels
        """Elements of each parameter."""
        offset = 0
        size = max(1, self.size)
        for index in trained:
            self.offsets[index] = offset
            self.first_rank[index] = offset // size
            offset += weights.numels[index]
            self.last_rank[index] = max(offset - 1, 0) // size

    def owns(self, index: int) -> bool:
        """Whether a part of the parameter is this rank's."""
        return self.first_rank[index] <= self.rank <= self.last_rank[index]

    def slice_numel(self, index: int) -> int:
        """Elements of the parameter inside this rank's part."""
        start = self.offsets[index]
        low = max(start, self.rank * self.size)
        high = min(start + self.numels[index], (self.rank + 1) * self.size)
        return max(0, high - low)

    @cached_property
    def owned(self) -> list[int]:
        """The parameters that touch this rank's part."""
        return [index for index in self.order if self.owns(index)]

    @cached_property
    def whole_numel(self) -> int:
        """Elements of those parameters, whole: what stage 2 keeps gradients for."""
        return sum(self.numels[index] for index in self.owned)

    @cached_property
    def fullest_rank(self) -> int:
        """The rank whose whole parameters are the most; the lowest of several."""
        whole = [0] * self.num_ranks
        for index in self.order:
            for rank in range(self.first_rank[index], self.last_rank[index] + 1):
                whole[rank] += self.numels[index]
        return whole.index(max(whole))

    @cached_property
    def largest_slice(self) -> int:
        """Elements of the largest piece of one parameter in this rank's part."""
        return max((self.slice_numel(index) for index in self.owned), default=0)

    def cuts(self, index: int) -> list[int]:
        """Elements of the pieces that the parts' boundaries cut a parameter into."""
        start, numel = self.offsets[index], self.numels[index]
        pieces = []
        for rank in range(self.first_rank[index], self.last_rank[index] + 1):
            low = max(start, rank * self.size)
            pieces.append(min(start + numel, (rank + 1) * self.size) - low)
        return pieces


def deal_round_robin(items: Sequence[int], num_ranks: int) -> list[int]:
    """The order of ``round_robin_gradients``: every n-th parameter, rank after rank.

    >>> deal_round_robin([0, 1, 2, 3, 4], 2)
    [0, 2, 4, 1, 3]
    """
    return [item for rank in range(num_ranks) for item in items[rank::num_ranks]]


def shard_numel(numel: int, num_ranks: int) -> int:
    """Elements of one rank's shard of a parameter in stage 3, padding included.

    >>> shard_numel(10, 4)
    3
    """
    return -(-numel // num_ranks)


def sub_groups(shards: Sequence[int], *, limit: int) -> list[int]:
    """Sizes of the groups that stage 3 updates at once [elements].

    A group is closed by the parameter that reaches the limit (stage3.py,
    ``_create_fp16_sub_groups``).

    >>> sub_groups([4, 4, 4], limit=5)
    [8, 4]
    """
    if limit >= sum(shards):
        return [sum(shards)]
    groups: list[int] = []
    filled = 0
    for shard in shards:
        filled += shard
        if filled >= limit:
            groups.append(filled)
            filled = 0
    if filled:
        groups.append(filled)
    return groups
