"""Stage 3: parameters, gradients and optimizer states are sharded (runtime/zero/stage3.py).

Legend: W bytes of a weight, P elements of this rank's shards (one of padding for each parameter at
most), n the largest parameter, R ``reduce_bucket_size``. Held: WP shards, 4P master weights and
states, WP gradients and the bucket WR, all allocated once, and after a step the parameters that
stay gathered. The step lets those go, takes the norm of one shard after the other in fp64, and for
each sub-group flattens its gradients (WP') and casts them to fp32 (4P').
"""

from functools import lru_cache

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.tensors import Parameter, allocated_bytes
from memplan.memory.account import ComponentKind, Entry, RankAccount, make_phase
from memplan.memory.deepspeed.coordinator import FetchSettings
from memplan.memory.deepspeed.host import sharded_host
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.modules import Scripts, remembered_scripts
from memplan.memory.deepspeed.partition import shard_numel, sub_groups
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.recording import REMEMBERED, Keyed
from memplan.memory.deepspeed.reduction import NORM_BYTES
from memplan.memory.deepspeed.sharded_step import (
    ScatterSettings,
    StepOffers,
    StepReplay,
    backward_peak,
    forward_peak,
)
from memplan.training.setup import Offload

FLAG_BYTES = DType.BOOL.num_bytes
"""What says of one gradient whether it overflowed."""


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


def sharded_account(job: Job) -> RankAccount:
    """The account of stage 3."""
    plan = shard_plan(job)
    made = _made(job, plan)
    held = [*made, *_after_step(job, plan)]
    passes, timeline = job.given.passes, job.timeline
    scripts = remembered_scripts(
        Keyed(job.given.tape), Keyed(passes), Keyed(job.weights), plan.persistent
    )
    fetching = fetch_settings(job)
    offers = _offers(
        Keyed((job, scripts), job.shape), scripts.shape, fetching, scatter_settings(job)
    )
    forward = forward_peak(passes, scripts.segments, offers, gathers=fetching.gathers)
    backward = backward_peak(passes, timeline, scripts.segments, offers)
    phases = (
        make_phase("load", _load(job, plan, made)),
        job.peak_phase("forward", held, forward),
        job.peak_phase("backward", held, backward),
        job.peak_phase("step", held[: len(held) - 1], _step(job, plan)),
        job.phase("save", held, _gathered_for_saving(job)),
    )
    return RankAccount(
        rank=job.rank,
        phases=phases,
        held_bytes=job.phase("held", held).peak_bytes,
        host=sharded_host(job, shards=plan.shards, groups=plan.groups),
    )


@lru_cache(maxsize=REMEMBERED)
def _offers(
    replayed: "Keyed[tuple[Job, Scripts]]",
    shape: object,  # noqa: ARG001  (part of the key alone)
    fetching: FetchSettings,
    scattering: ScatterSettings,
) -> StepOffers:
    """What the engine holds and where: the same for every batch that runs the same modules."""
    job, scripts = replayed.value
    return StepReplay(
        passes=job.given.passes,
        timeline=job.timeline,
        segments=job.given.tape.segments,
        scripts=scripts.segments,
        numels=job.weights.numels,
        fetching=fetching,
        scattering=scattering,
    ).run()


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


def _made(job: Job, plan: ShardPlan) -> list[Entry]:
    """What is there once the engine is set up."""
    shards = 0 if job.offloads_param else sum(plan.shards)
    states = 0 if job.offloads_optimizer else plan.total
    return [
        Entry(ComponentKind.PARAMETERS, job.weight_bytes * shards, "this rank's shards"),
        Entry(
            ComponentKind.MASTER_WEIGHTS,
            job.master_bytes * states if job.given.formats.master_weights else 0,
            f"{job.master_name}, of the same shards",
        ),
        Entry(
            ComponentKind.GRADIENTS,
            job.gradient_bytes * states,
            "one for each shard, allocated once",
        ),
        Entry(
            ComponentKind.COMMUNICATION_BUFFERS,
            plan.bucket_bytes,
            "the reduce bucket, allocated once",
        ),
    ]


def _after_step(job: Job, plan: ShardPlan) -> list[Entry]:
    """What the first step adds; the last entry is what the next one lets go at first."""
    states = 0 if job.offloads_optimizer else job.num_states * job.master_bytes * plan.total
    return [
        Entry(
            ComponentKind.OPTIMIZER_STATES,
            states,
            f"{job.num_states} x {job.master_name} of the shards",
        ),
        Entry(
            ComponentKind.GATHERED_PARAMETERS,
            plan.persistent_bytes,
            "small parameters that stay gathered (stage3_param_persistence_threshold)",
        ),
    ]


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


def _load(job: Job, plan: ShardPlan, made: list[Entry]) -> list[Entry]:
    """The highest of: the model sharded parameter by parameter, the fp32 copies, the hooks."""
    candidates = [_hooks(job, plan, made), _master(job, plan)]
    if not job.options.zero_init:
        candidates.append(_sharding(job, plan))
    return max(candidates, key=lambda entries: sum(each.num_bytes for each in entries))


def _hooks(job: Job, plan: ShardPlan, made: list[Entry]) -> list[Entry]:
    """Hooks are hung on each parameter while it is gathered."""
    largest = shard_numel(job.weights.largest_trained, job.num_ranks) * job.num_ranks
    gathered = Entry(
        ComponentKind.GATHERED_PARAMETERS,
        allocated_bytes(largest, job.given.formats.weights),
        "the largest parameter, gathered to hang a hook on it",
    )
    arriving = Entry(
        ComponentKind.TEMPORARIES,
        job.weight_bytes * max(plan.shards) if job.offloads_param else 0,
        "its shard, from the CPU",
    )
    return [*made, gathered, arriving]


def _master(job: Job, plan: ShardPlan) -> list[Entry]:
    """Each sub-group's fp32 copy is cloned; then there is one fp32 gradient of the largest."""
    if job.offloads_optimizer or not job.given.formats.master_weights:
        return []
    largest = max(plan.groups)
    before_last = plan.total - plan.groups[-1]
    cloning = before_last + 2 * plan.groups[-1]
    extra = max(cloning - plan.total, largest)
    return [
        Entry(ComponentKind.PARAMETERS, job.weight_bytes * sum(plan.shards), "shards"),
        Entry(
            ComponentKind.MASTER_WEIGHTS,
            job.master_bytes * plan.total,
            f"{job.master_name}, of the shards",
        ),
        Entry(
            ComponentKind.GRADIENTS,
            job.master_bytes * extra,
            f"{job.master_name} zeros of the largest sub-group",
        ),
    ]


def _sharding(job: Job, plan: ShardPlan) -> list[Entry]:
    """Without zero.Init the whole model comes to the GPU and is cut up there."""
    whole = highest = job.model_bytes
    width = job.weight_bytes
    keeps = not job.offloads_param
    for numel, shard in zip(job.weights.numels, plan.shards, strict=True):
        if keeps:
            whole += width * shard
            highest = max(highest, whole)
        whole -= width * numel
    return [
        Entry(
            ComponentKind.PARAMETERS,
            highest,
            "the whole model, before it is sharded (zero.Init avoids this)",
        )
    ]


def looks_for_overflow(job: Job) -> bool:
    """Whether the step goes through all gradients at once first: their absolute values, and a flag
    for each (stage3.py, ``has_overflow``)."""
    return job.given.formats.weights is DType.FP16


def _step(job: Job, plan: ShardPlan) -> Peak:
    peak = Peak()
    peak.offer(0, gathered=plan.persistent_bytes)
    if job.offloads_optimizer:
        return peak
    if looks_for_overflow(job):
        peak.offer(0, temporaries=(job.gradient_bytes + FLAG_BYTES) * plan.total)
    peak.offer(0, temporaries=rounded(NORM_BYTES * max(plan.trained, default=0)))
    largest = max(plan.groups, default=0)
    cast = 0 if job.gradient_bytes == job.master_bytes else job.master_bytes * largest
    peak.offer(0, temporaries=job.gradient_bytes * largest + cast)
    copies = (job.master_bytes + job.step_copies_bytes) * largest
    peak.offer(0, temporaries=copies)
    return peak


def _gathered_for_saving(job: Job) -> Entry:
    """The module that is gathered while the 16-bit model is put together on rank 0."""
    largest = 0
    if job.options.gather_16bit_weights_on_model_save:
        for segment in job.given.tape.segments:
            modules: dict[str, list[int]] = {}
            for each in segment.parameters:
                modules.setdefault(each.module, []).append(each.storage.num_bytes)
            for sizes in modules.values():
                copies = 2 if len(sizes) > 1 and job.num_ranks > 1 else 1
                largest = max(largest, copies * sum(sizes))
    return Entry(
        ComponentKind.GATHERED_PARAMETERS,
        largest,
        "one module at a time, on its way to rank 0's CPU",
    )
