"""Stage 3: parameters are sharded too (runtime/zero/stage3.py).

Each parameter is cut into equal shards, one element of padding at most. Held: the shards, fp32
master weights and states of them, a gradient for each shard, and one reduce bucket, all allocated
once. The bucket has the dtype in which gradients travel between the ranks. A full one is
reduce-scattered through a copy in which the shards of each rank stand together
(``comm/coalesced_collectives.py``), but for a single gradient that divides evenly; gradients that lie
outside it, larger than it or for want of one (``contiguous_gradients``), are cast first where they
travel in another dtype. Without ``reduce_scatter`` the bucket is summed in place and then multiplied
into a copy. This rank's shards are cast to the dtype in which they accumulate.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import Parameter
from memplan.memory.deepspeed.coordinator import FetchSettings
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.partition import shard_numel, sub_groups
from memplan.training.choices import Offload
from memplan.units import ceil_div

FLAG_BYTES = DType.BOOL.num_bytes
"""What says of one gradient whether it overflowed."""


NORM_CHUNK = 250_000_000
"""Elements whose norm is taken at once with offload (``_constant_buffered_norm2``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatterSettings:
    """How stage 3 reduces gradients."""

    num_ranks: int
    bucket_numel: int
    weight_bytes: int
    """Of a gradient as autograd makes it."""
    communication_bytes: int
    """Of a gradient in the bucket and on its way between the ranks."""
    accumulated_bytes: int
    """Of an element of a shard's gradient where it accumulates."""
    is_contiguous: bool
    """There is a bucket: gradients move into it."""
    scatters: bool
    """The bucket is reduce-scattered, not summed as a whole."""
    offloads: bool
    """Shards' gradients go to the CPU."""
    swaps: bool
    """They go on to NVMe, in fp32, a bucket at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Sizes that the phases share."""

    shards: list[int]
    """Of every parameter [elements]."""
    trained: list[int]
    """Of the trained ones."""
    groups: list[int]
    """Of each sub-group."""
    persistent: frozenset[Parameter]
    persistent_bytes: int
    bucket_bytes: int

    @property
    def total(self) -> int:
        """Of all trained parameters [elements]."""
        return sum(self.trained)


def shard_plan(job: Job) -> ShardPlan:
    """Sizes of this rank's shards and of what is made from them."""
    weights = job.weights
    shards = [shard_numel(numel, job.num_ranks) for numel in weights.numels]
    trained = [shard for shard, kept in zip(shards, weights.trainable, strict=True) if kept]
    persistent, persistent_bytes = _persistent(job)
    return ShardPlan(
        shards=shards,
        trained=trained,
        groups=sub_groups(trained, limit=job.options.sub_group_size),
        persistent=persistent,
        persistent_bytes=persistent_bytes,
        bucket_bytes=_bucket_bytes(job),
    )


def _bucket_bytes(job: Job) -> int:
    if not job.options.contiguous_gradients:
        return 0
    return rounded(job.communication_bytes * job.options.reduce_bucket_size)


def _persistent(job: Job) -> tuple[frozenset[Parameter], int]:
    """Parameters that stay gathered, and their bytes (parameter_offload.py,
    ``mark_persistent_parameters``); on one rank they are views of their shards."""
    options = job.options
    kept: set[Parameter] = set()
    size = total = 0
    for segment in job.given.tape.segments:
        for parameter in segment.parameters:
            fits = (
                total + parameter.numel * segment.num_copies <= options.model_persistence_threshold
            )
            if parameter.numel <= options.param_persistence_threshold and fits:
                kept.add(parameter)
                total += parameter.numel * segment.num_copies
                size += parameter.storage.num_bytes * segment.num_copies
    gathers = job.num_ranks > 1 or job.offloads_param
    return frozenset(kept), size if gathers else 0


def fetch_settings(job: Job) -> FetchSettings:
    """What the coordinator goes by."""
    options = job.options
    return FetchSettings(
        num_ranks=job.num_ranks,
        weight_bytes=job.weight_bytes,
        prefetch_bucket_size=options.prefetch_bucket_size,
        max_live_parameters=options.max_live_parameters,
        max_reuse_distance=options.max_reuse_distance,
        sequential=options.allgather_sequential,
        offloaded=job.offloads_param,
        swapped=job.swapped_share(job.model_bytes // (job.weight_bytes * job.num_ranks)),
    )


def scatter_settings(job: Job) -> ScatterSettings:
    """How gradients are reduced."""
    return ScatterSettings(
        num_ranks=job.num_ranks,
        bucket_numel=job.options.reduce_bucket_size,
        weight_bytes=job.weight_bytes,
        communication_bytes=job.communication_bytes,
        accumulated_bytes=job.gradient_bytes,
        is_contiguous=job.options.contiguous_gradients,
        scatters=job.options.reduce_scatter,
        offloads=job.offloads_optimizer,
        swaps=job.given.setup.offload_optimizer is Offload.NVME,
    )


def paddings(numels: Sequence[int], ranks: int) -> list[int]:
    """What fills up ranks' parts of gradients before they are scattered together, rank by rank
    (runtime/comm/coalesced_collectives.py, ``reduce_scatter_coalesced``).

    >>> paddings([2, 8, 7], 4)
    [1, 1, 1]
    """
    found = []
    for place, numel in enumerate(numels):
        if numel % ranks:
            part = ceil_div(numel, ranks)
            missing = (
                (rank, part - max(numel - rank * part, 0)) for rank in range(numel // part, ranks)
            )
            found += [(rank, place, size) for rank, size in missing]
    return [size for _, _, size in sorted(found)]


def module_numbers(weights: Sequence[tuple[int, int]], copy: int) -> list[int]:
    """A module's parameters in one repetition, in the order of the model's."""
    return sorted([first + stride * copy for first, stride in weights])
