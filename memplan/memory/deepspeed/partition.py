"""The model's parameters one by one, and how ZeRO deals them to the ranks.

Parameters stand in the order of ``model.parameters()``, by which the flat buffer is cut
(``memplan.graph.declaration``).
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.declaration import declared_parameters
from memplan.graph.remembered import OF_TAPES


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
    """Every parameter of the model, repetitions written out; ``model_weights`` remembers them."""

    def __init__(self, tape: Tape) -> None:
        self.numels: list[int] = []
        """Elements of each [elements]."""
        self.trainable: list[bool] = []
        self.packed_numel = self.packed_bytes = 0
        """Elements of quantized weights' codes, which have a format of their own, and their bytes."""
        self.owners: dict[Parameter, int] = {}
        """The number of each parameter of the tape, in its segment's first repetition."""
        parts: dict[int, _Part] = {}
        self.numbers: dict[tuple[Parameter, int], int] = {}
        """Those that were asked for."""
        self.copies = [segment.num_copies for segment in tape.segments]
        """How often each segment's parameters are there."""
        for segment, parameters in declared_parameters(tape):
            part = parts.setdefault(segment.index, _Part())
            first, stride = len(self.numels), len(parameters)
            part.stride = stride
            for position, each in enumerate(parameters):
                part.places[each] = first + position
            self.owners.update(part.places)
            self.numels += [each.numel for each in parameters] * segment.num_copies
            for each in parameters:
                if each.packed is not None:
                    self.packed_numel += each.numel * segment.num_copies
                    self.packed_bytes += each.numel * each.dtype.num_bytes * segment.num_copies
            self.trainable += [each.requires_grad for each in parameters] * segment.num_copies
        self.segments = [
            parts.get(segment.index, _Part()).as_segment_weights() for segment in tape.segments
        ]

    def number(self, parameter: Parameter, copy: int) -> int:
        """Where a parameter of one copy of its segment stands among all."""
        return self.owners[parameter] + self._strides[parameter] * copy

    def place(self, number: int) -> tuple[int, int]:
        """The segment that holds a parameter, and its position there, the same in every copy."""
        for index, own in enumerate(self.segments):
            count = len(own.positions)
            if own.first <= number and own.stride:
                position = (number - own.first) % own.stride
                copies = (number - own.first) // own.stride
                if position < count and copies < self.copies[index]:
                    return index, position
        return -1, number

    @cached_property
    def _strides(self) -> dict[Parameter, int]:
        return {each: own.stride for own in self.segments for each in own.positions}

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


@OF_TAPES.remembered(maxsize=64)
def model_weights(tape: Tape) -> ModelWeights:
    """The parameters of a tape: the same for every setup that is recorded so."""
    return ModelWeights(tape)


class Numels(Protocol):
    """Parameters, as far as cutting them goes."""

    @property
    def numels(self) -> Sequence[int]:
        """Elements of each [elements]."""

    @property
    def trainable(self) -> Sequence[bool]:
        """Whether each is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKind:
    """Ranks whose parts of the flat buffer hold the same: one, or all inside one parameter."""

    ranks: range
    """Never empty."""
    slices: tuple[tuple[int, int], ...]
    """The parameters that touch the part, in the buffer's order, and the elements inside it."""
    whole_numel: int
    """Elements of those parameters, whole: what stage 2 keeps gradients for."""

    @property
    def rank(self) -> int:
        """The first of them."""
        return self.ranks[0]

    @property
    def largest_slice(self) -> int:
        """Elements of the largest piece of one parameter in the part."""
        return max((numel for _, numel in self.slices), default=0)


class FlatBuffer:
    """Stages 1 and 2: one flat buffer, cut into equal parts (stage_1_and_2.py, ``__init__``).

    The buffer is padded to two elements for each rank, so that every part starts at 4 bytes.
    """

    def __init__(self, weights: Numels, *, num_ranks: int, round_robin: bool) -> None:
        self.num_ranks = num_ranks
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
        self._sums: dict[tuple[int, int], list[tuple[int, bool]]] = {}
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

    def sums(self, index: int, limit: int) -> list[tuple[int, bool]]:
        """How a parameter larger than ``limit`` is summed over the ranks: elements at a time, and whether they
        are of more than one part. Each ends with the piece that exceeds the limit; every rank does the same.
        """
        found = self._sums.get((index, limit))
        if found is None:
            found = self._sums[index, limit] = gathered_up(self.cuts(index), limit)
        return found

    def cuts(self, index: int) -> list[int]:
        """Elements of the pieces that the parts' boundaries cut a parameter into."""
        start, numel = self.offsets[index], self.numels[index]
        pieces = []
        for rank in range(self.first_rank[index], self.last_rank[index] + 1):
            low = max(start, rank * self.size)
            pieces.append(min(start + numel, (rank + 1) * self.size) - low)
        return pieces

    def largest_share(self, indices: Sequence[int]) -> int:
        """Of these parameters, the most elements that lie in one rank's part."""
        shares: dict[int, int] = {}
        for index in indices:
            first, last = self.first_rank[index], self.last_rank[index]
            if last - first > 1:
                return self.size
            start, numel = self.offsets[index], self.numels[index]
            here = min(start + numel, (first + 1) * self.size) - start
            shares[first] = shares.get(first, 0) + here
            if last > first:
                shares[last] = shares.get(last, 0) + numel - here
        return max(shares.values(), default=0)

    @cached_property
    def every_rank(self) -> list[RankKind]:
        """All ranks: each where parameters begin or end, those inside one parameter at once.

        There are at most two for each parameter, and one, however many ranks there are.
        """
        inside: list[RankKind] = []
        edges: dict[int, list[tuple[int, int]]] = {}
        beyond = 0
        for index in self.order:
            first, last = self.first_rank[index], self.last_rank[index]
            start, numel = self.offsets[index], self.numels[index]
            for rank in dict.fromkeys((first, last) if first <= last else ()):
                low = max(start, rank * self.size)
                high = min(start + numel, (rank + 1) * self.size)
                edges.setdefault(rank, []).append((index, high - low))
            if last - first > 1:
                ranks = range(first + 1, last)
                slices = ((index, self.size),)
                inside.append(RankKind(ranks=ranks, slices=slices, whole_numel=numel))
            beyond = max(beyond, last + 1)
        for rank, slices_found in edges.items():
            whole = sum(self.numels[index] for index, _ in slices_found)
            inside.append(
                RankKind(ranks=range(rank, rank + 1), slices=tuple(slices_found), whole_numel=whole)
            )
        if beyond < self.num_ranks:
            padding = range(beyond, self.num_ranks)
            inside.append(RankKind(ranks=padding, slices=(), whole_numel=0))
        return sorted(inside, key=_first_rank)

    def kind_of(self, rank: int) -> RankKind:
        """The kind that a rank is of."""
        kinds = self.every_rank
        return kinds[bisect_right(kinds, rank, key=_first_rank) - 1]


def _first_rank(kind: RankKind) -> int:
    return kind.rank


class FlatPartition:
    """One rank's part of the flat buffer."""

    def __init__(self, buffer: FlatBuffer, rank: int) -> None:
        self.buffer = buffer
        self.rank = rank
        self.kind = buffer.kind_of(rank)
        self.numel = buffer.numel
        """Elements of the padded buffer."""
        self.size = buffer.size
        """Elements of the part."""
        self.whole_numel = self.kind.whole_numel
        """Elements of the parameters that touch it, whole: what stage 2 keeps gradients for."""
        self.largest_slice = self.kind.largest_slice
        """Elements of the largest piece of one parameter in it."""

    @cached_property
    def owned(self) -> list[int]:
        """The parameters that touch this rank's part."""
        return [index for index, _ in self.kind.slices]


def gathered_up(pieces: Iterable[int], limit: int) -> list[tuple[int, bool]]:
    """Pieces put together until they exceed a limit: their sum, and whether they are more than one.

    >>> gathered_up([3, 3, 3, 9, 2], limit=5)
    [(6, True), (12, True), (2, False)]
    """
    found: list[tuple[int, bool]] = []
    total = count = 0
    for piece in pieces:
        total += piece
        count += 1
        if total > limit:
            found.append((total, count > 1))
            total = count = 0
    return [*found, (total, count > 1)] if count else found


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
