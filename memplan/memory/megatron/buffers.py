"""Megatron's contiguous buffers: where each weight lies in them, and which part of it a rank steps.

Megatron-core 0.16.1, core/distributed/param_and_grad_buffer.py (``_ParamAndGradBuffer``), core/optimizer/
distrib_optimizer.py (``_build_gbuf_range_map``).
"""

from functools import lru_cache
from math import gcd, lcm

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.memory.megatron.options import MegatronStates
from memplan.memory.rank import RankInput
from memplan.training.setup import TrainingSetup
from memplan.units import round_up

PARAM_ALIGNMENT = 64
"""Parameters: each starts at a multiple of it (128 bytes of 16 bits each)."""
BUCKET_ALIGNMENT = 128
"""Parameters: each bucket ends at a multiple of it, and of the ranks."""
BUS_ALIGNMENT = 2**16
"""The same for NCCL's bandwidth (``pad_buckets_for_high_nccl_busbw``)."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A weight's place in the buffer."""

    number: int
    """Which weight it is, in the order of ``named_parameters()``."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of the buffer that is reduced at once."""

    start: int
    stop: int
    weights: tuple[Laid, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """All weights of one format, the last one first."""

    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    def shards(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Of each weight that a rank has something of: its number, and how many elements."""
        found = []
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // num_ranks
            low, high = bucket.start + rank * size, bucket.start + (rank + 1) * size
            for each in bucket.weights:
                numel = min(each.stop, high) - max(each.start, low)
                if numel > 0:
                    found.append((each.number, numel))
        return found


@lru_cache(maxsize=256)
def lay_out(sizes: tuple[int, ...], states: MegatronStates, data_parallel: int) -> Buffer:
    """Place weights of these sizes, the last first; a bucket ends when it has its size.

    >>> states = MegatronStates(use_distributed_optimizer=True)
    >>> lay_out((100, 10), states, 8).numel
    256
    """
    pads = states.use_distributed_optimizer
    divisor = lcm(data_parallel, BUCKET_ALIGNMENT)
    if states.ddp_pad_buckets_for_high_nccl_busbw:
        divisor = lcm(divisor, BUS_ALIGNMENT)
    cap = states.bucket_size(data_parallel)
    buckets: list[Bucket] = []
    inside: list[Laid] = []
    begin = position = 0

    def close() -> int:
        stop = round_up(position, divisor) if pads else position
        buckets.append(Bucket(begin, stop, tuple(inside)))
        inside.clear()
        return stop

    for number in range(len(sizes) - 1, -1, -1):
        start = round_up(position, PARAM_ALIGNMENT) if pads else position
        position = start + sizes[number]
        inside.append(Laid(number, start, position))
        if cap is not None and position - begin >= cap:
            begin = position = close()
    if inside:
        close()
    return Buffer(tuple(buckets))


def shard_ranks(setup: TrainingSetup) -> int:
    """Ranks over which states are sharded: those of data, and those that share its sequences.

    (``get_data_parallel_group(with_context_parallel=True)``)
    """
    return setup.data_parallel * setup.context_parallel


@dataclass(frozen=True, slots=True)
class Group:
    """Weights whose gradients are reduced over the same ranks, in a buffer of their own."""

    numbers: tuple[int, ...]
    """Of its weights, in the order of ``named_parameters()``."""
    buffer: Buffer
    num_ranks: int
    """Over which it is sharded."""
    stride: int
    """How far apart these are: those between have other parts, or other experts, in their place."""
    is_spread: bool = False
    """Its weights are of experts that are spread over ranks."""

    def shards(self, rank: int) -> list[tuple[int, int]]:
        """Of each weight that a rank steps something of: its number, and how many elements."""
        found = self.buffer.shards(self.place_of(rank), self.num_ranks)
        return [(self.numbers[number], numel) for number, numel in found]

    def place_of(self, rank: int) -> int:
        """Which of its shards a rank has."""
        return rank // self.stride % self.num_ranks


def groups_of(given: RankInput, states: MegatronStates) -> list[Group]:
    """All weights, and apart from them experts that are spread over ranks.

    (core/distributed/distributed_data_parallel.py: ``expert_parallel_params``)
    """
    setup = given.setup
    weights = _weights_of(given)
    apart = [setup.expert_parallel > 1 and each.experts is not None for each in weights]
    found = []
    for is_spread, stride in ((False, setup.tensor_parallel), (True, expert_stride(given))):
        numbers = tuple(number for number, each in enumerate(apart) if each is is_spread)
        if numbers:
            sizes = tuple(weights[number].numel for number in numbers)
            num_ranks = shard_ranks(setup) * setup.tensor_parallel // stride
            buffer = lay_out(sizes, states, num_ranks)
            found.append(Group(numbers, buffer, num_ranks, stride, is_spread))
    return found


def expert_stride(given: RankInput) -> int:
    """Ranks next to one another that together have all experts once."""
    layers = given.tape.options.megatron
    assert layers is not None
    setup = given.setup
    return layers.expert_ranks(setup.tensor_parallel) * setup.expert_parallel


def _weights_of(given: RankInput) -> list[Parameter]:
    return [
        parameter
        for segment in given.tape.segments
        for _ in range(segment.num_copies)
        for parameter in segment.parameters
    ]


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """Tensor-parallel ranks hold the same, but for shards of experts that are split otherwise; data-parallel
    ones other shards."""
    setup = given.setup
    states = MegatronStates.of(setup)
    if not states.use_distributed_optimizer:
        return [(range(setup.num_gpus),)]
    found: dict[tuple[int, ...], list[range]] = {}
    unit, shards = _shard_sizes(given, states)
    for number, sizes in enumerate(shards):
        found.setdefault(sizes, []).append(range(number * unit, (number + 1) * unit))
    return [tuple(runs) for runs in found.values()]


def heaviest_ranks(given: RankInput) -> list[int]:
    """The one whose shards are the largest once rounded up to blocks."""
    states = MegatronStates.of(given.setup)
    if not states.use_distributed_optimizer or shard_ranks(given.setup) == 1:
        return [0]
    unit, shards = _shard_sizes(given, states)
    totals = [sum(sizes) for sizes in shards]
    return [totals.index(max(totals)) * unit]


def _shard_sizes(given: RankInput, states: MegatronStates) -> tuple[int, list[tuple[int, ...]]]:
    """For each rank, its fp32 shards' bytes as the allocator rounds them up; and how many ranks next to one
    another are alike, of which one is told."""
    setup = given.setup
    groups = groups_of(given, states)
    unit = gcd(*(each.stride for each in groups))
    count = shard_ranks(setup) * setup.tensor_parallel // unit
    found: list[list[int]] = [[] for _ in range(count)]
    for group in groups:
        by_place = _sizes_by_rank(group)
        for number in range(count):
            found[number] += by_place[group.place_of(number * unit)]
    return unit, [tuple(sorted(sizes)) for sizes in found]


def _sizes_by_rank(group: Group) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(group.num_ranks)]
    for bucket in group.buffer.buckets:
        size = (bucket.stop - bucket.start) // group.num_ranks
        for each in bucket.weights:
            first = (each.start - bucket.start) // size
            last = (each.stop - 1 - bucket.start) // size
            for rank in range(first, last + 1):
                low = bucket.start + rank * size
                numel = min(each.stop, low + size) - max(each.start, low)
                found[rank].append(round_up(4 * numel, ALLOCATION_ROUNDING))
    return found
