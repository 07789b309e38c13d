"""Stages 1 and 2: optimizer states are sharded, in stage 2 gradients too.

Legend: W bytes of a weight, Φ trained parameters, P one rank's part of the flat buffer, G the
parameters that touch it, whole, S the largest piece of one of them inside it, n the largest
parameter. Held: WΦ weights, 4P master weights and states; with the optimizer on the CPU, WΦ and a
staging buffer Wn. The step holds the G gradients; it takes the norm of one after the other in fp64
(8S), or flattens them (WP) and casts the result to fp32 (4P), whichever is more
(runtime/zero/stage_1_and_2.py, ``step``). With fp32 accumulation it holds 4P instead, which needs
neither, and, while the norm is taken, what stage 1 left (``Reduction.left_bytes``).
"""

from dataclasses import replace
from functools import lru_cache

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry, HostMemory, RankAccount, make_phase
from memplan.memory.deepspeed.host import replicated_host, saved_bytes, writer_bytes
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.partition import FlatBuffer, FlatPartition, RankKinds
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.recording import (
    REMEMBERED,
    Keyed,
    Offer,
    Recording,
    candidates,
    highest,
)
from memplan.memory.deepspeed.reduction import (
    COMPACT_BYTES,
    NORM_BYTES,
    ReductionSettings,
    reduce_after_backward,
    reduce_while_backward,
)
from memplan.memory.deepspeed.timeline import BackwardTimeline
from memplan.memory.step import Height
from memplan.training.setup import ZeroStage


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Sizes that the phases share."""

    partition: FlatPartition
    settings: ReductionSettings
    sharded_gradients: bool
    """Stage 2."""
    owned_bytes: int
    """The buffer of this rank's own gradients."""
    carried_bytes: int
    """Gradients that earlier micro-steps leave."""
    carried_buckets_bytes: int
    """Buckets that they leave (stage 1, whose bucket waits for the reduction)."""


def sharded_states_account(job: Job) -> RankAccount:
    """The account of stages 1 and 2."""
    plan = _plan(job)
    held = _held(job, plan)
    reduced = _reduced(job, plan, plan.partition.alone)
    phases = (
        make_phase("load", _load(job, plan)),
        job.peak_phase("forward", held, _forward(plan, job.forward_height)),
        job.peak_phase("backward", held, highest(reduced.offers, job.timeline)),
        job.peak_phase("step", held, _step(job, plan, reduced.left_bytes[0])),
        job.phase("save", held),
    )
    return RankAccount(
        rank=job.rank,
        phases=phases,
        held_bytes=job.phase("held", held).peak_bytes,
        host=_host(job, plan),
    )


def worst_rank(job: Job) -> int:
    """A rank whose training step rises highest; which one ``job`` is of does not matter.

    What all ranks hold between steps is equal, and so is what forward and backward leave alive, so
    the highest of the phases' peaks over all ranks is the worst rank's.
    """
    plan = _plan(job)
    every = plan.partition.buffer.every_rank
    reduced = _reduced(job, plan, every)
    backward = highest(reduced.offers, job.timeline)
    highest_bytes, worst = backward.total_bytes, backward.rank
    height = job.forward_height
    for number in reduced.heaviest:
        rank = every.kinds[number].rank
        own = _plan(replace(job, rank=rank))
        step = _step(job, own, reduced.left_bytes[number])
        total = max(_forward(own, height).total_bytes, step.total_bytes)
        if total > highest_bytes:
            highest_bytes, worst = total, rank
    return worst


def _forward(plan: _Plan, height: Height) -> Peak:
    peak = Peak()
    peak.offer(
        height.total_bytes,
        gradients=plan.carried_bytes,
        buckets=plan.carried_buckets_bytes,
        height=height,
    )
    return peak


def reduction_settings(job: Job, partition: FlatPartition) -> ReductionSettings:
    """How gradients are reduced."""
    options = job.options
    stage2 = job.given.setup.zero_stage is ZeroStage.GRADIENTS
    compact = job.accumulates_apart and job.gradient_bytes == COMPACT_BYTES
    keeps_whole = not compact and not job.offloads_optimizer
    return ReductionSettings(
        bucket_numel=options.reduce_bucket_size,
        num_buckets=2 if options.overlap_comm else 1,
        element_bytes=job.weight_bytes if stage2 else job.gradient_bytes,
        communication_bytes=job.communication_bytes,
        casts=job.accumulates_apart and not stage2,
        keeps_all=not stage2,
        offloads=job.offloads_optimizer,
        scatters=options.reduce_scatter,
        compact=compact,
        owned_element_bytes=job.weight_bytes if keeps_whole else 0,
        owned_part_bytes=rounded(COMPACT_BYTES * partition.size) if compact else 0,
    )


def _plan(job: Job) -> _Plan:
    partition = job.partition(round_robin=job.options.round_robin_gradients)
    stage2 = job.given.setup.zero_stage is ZeroStage.GRADIENTS
    settings = reduction_settings(job, partition)
    owned = settings.owned_bytes(partition.whole_numel)
    carried = buckets = 0
    if job.accumulates:
        carried = owned if stage2 else job.gradient_bytes * job.weights.num_trained
        buckets = 0 if stage2 else settings.buckets_bytes
    return _Plan(
        partition=partition,
        settings=settings,
        owned_bytes=owned,
        sharded_gradients=stage2,
        carried_bytes=carried,
        carried_buckets_bytes=buckets,
    )


def _held(job: Job, plan: _Plan) -> list[Entry]:
    flat = job.weight_bytes * plan.partition.numel + job.frozen_bytes
    part = plan.partition.size
    entries = [Entry(ComponentKind.PARAMETERS, flat, "every weight, on every rank")]
    if job.offloads_optimizer:
        staging = Entry(
            ComponentKind.COMMUNICATION_BUFFERS,
            job.largest_bytes,
            "a staging buffer of the largest parameter's size",
        )
        return [*entries, staging]
    states = rounded(job.master_bytes * part)
    return [
        *entries,
        Entry(
            ComponentKind.MASTER_WEIGHTS,
            states,
            f"{job.master_name}, this rank's part of the flat buffer",
        ),
        Entry(
            ComponentKind.OPTIMIZER_STATES,
            job.num_states * states,
            f"{job.num_states} x {job.master_name} of the same part",
        ),
    ]


def _load(job: Job, plan: _Plan) -> list[Entry]:
    """Flattening keeps two copies of the weights; then come master weights and zero gradients."""
    part = 0 if job.offloads_optimizer else job.master_bytes * plan.partition.size
    flat = job.weight_bytes * plan.partition.numel
    weights = Entry(ComponentKind.PARAMETERS, flat + job.frozen_bytes, "the flat buffer")
    copy = job.trained_bytes if flattens_on_gpu(job, plan.partition.numel) else 0
    if 2 * part > copy:
        return [
            weights,
            Entry(ComponentKind.MASTER_WEIGHTS, part, f"{job.master_name}, this rank's part"),
            Entry(ComponentKind.GRADIENTS, part, f"{job.master_name} zeros, for a moment"),
        ]
    return [weights, Entry(ComponentKind.TEMPORARIES, copy, "the weights before flattening")]


@dataclass(frozen=True, slots=True)
class _Reduced:
    """What a replay of the backward pass finds."""

    offers: tuple[Offer, ...]
    left_bytes: tuple[int, ...]
    """For each kind of ranks, gradients and buckets that it leaves until the step."""
    heaviest: tuple[int, ...]
    """The numbers of the kinds that can be the fullest in the step."""


def _reduced(job: Job, plan: _Plan, ranks: RankKinds) -> _Reduced:
    """The backward pass of some ranks: of this one alone, or of all."""
    timeline = Keyed(job.timeline, job.shape)
    buffer = plan.partition.buffer
    if plan.sharded_gradients or job.options.overlap_comm:
        carries_owned = plan.sharded_gradients and job.accumulates
        return _while_backward(
            timeline,
            plan.settings,
            buffer,
            ranks,
            carries_owned,
            0 if carries_owned else plan.carried_bytes,
            plan.carried_buckets_bytes,
        )
    return _after_backward(timeline, plan.settings, buffer, ranks, job.accumulates)


@lru_cache(maxsize=REMEMBERED)
def _while_backward(
    timeline: Keyed[BackwardTimeline],
    settings: ReductionSettings,
    buffer: FlatBuffer,
    ranks: RankKinds,
    carries_owned: bool,
    carried_bytes: int,
    carried_buckets_bytes: int,
) -> _Reduced:
    recording = Recording(timeline.value)
    left = reduce_while_backward(
        timeline.value,
        settings,
        buffer,
        ranks,
        carries_owned=carries_owned,
        carried_bytes=carried_bytes,
        carried_buckets_bytes=carried_buckets_bytes,
        peak=recording,
    )
    return _Reduced(candidates(recording, timeline.value), left, ranks.heaviest(left))


@lru_cache(maxsize=REMEMBERED)
def _after_backward(
    timeline: Keyed[BackwardTimeline],
    settings: ReductionSettings,
    buffer: FlatBuffer,
    ranks: RankKinds,
    carried: bool,
) -> _Reduced:
    sizes = [0] * len(buffer.numels)
    for moment in timeline.value.moments:
        if moment.weight >= 0:
            numel = buffer.numels[moment.weight]
            sizes[moment.weight] = settings.gradient_bytes(numel, moment.gradient_bytes)
    recording = Recording(timeline.value)
    left = reduce_after_backward(
        timeline.value,
        settings,
        buffer,
        ranks,
        carried=carried,
        gradient_sizes=sizes,
        peak=recording,
    )
    return _Reduced(candidates(recording, timeline.value), left, ranks.heaviest(left))


def _step(job: Job, plan: _Plan, left_bytes: int) -> Peak:
    """The update itself, or what lies between two micro-steps where that is more."""
    partition, compact = plan.partition, plan.settings.compact
    peak = Peak()
    peak.offer(0, gradients=plan.carried_bytes, buckets=plan.carried_buckets_bytes)
    owned = plan.owned_bytes
    peak.offer(0, gradients=owned, buckets=left_bytes)
    if job.offloads_optimizer:
        return peak
    if job.options.check_gradient_norm:
        peak.offer(
            0,
            gradients=owned,
            buckets=left_bytes,
            temporaries=rounded(NORM_BYTES * partition.largest_slice),
        )
    flat = 0 if compact or len(partition.owned) == 1 else job.weight_bytes * partition.size
    cast = (
        0 if compact or job.weight_bytes == job.master_bytes else job.master_bytes * partition.size
    )
    peak.offer(0, gradients=owned, temporaries=flat + cast)
    alone = job.master_bytes * partition.size
    peak.offer(0, gradients=alone, temporaries=job.step_copies_bytes * partition.size)
    return peak


def _host(job: Job, plan: _Plan) -> HostMemory:
    partition = plan.partition
    if not job.offloads_optimizer:
        # The model, and where it is flattened on the CPU a copy of it beside the flat buffer.
        copies = 1 if flattens_on_gpu(job, plan.partition.numel) else 2
        return HostMemory(
            load_bytes=copies * job.model_bytes,
            save_bytes=saved_bytes(job, part_numel=partition.size),
            writer_bytes=writer_bytes(job, part_numel=partition.size),
        )
    accumulated = 0
    if job.accumulates and plan.sharded_gradients and not plan.settings.compact:
        accumulated = job.weight_bytes * partition.whole_numel
    return replicated_host(job, part_numel=partition.size, accumulated_bytes=accumulated)


def flattens_on_gpu(job: Job, numel: int) -> bool:
    """Whether the GPU has room for the weights and their flat copy."""
    if job.capacity_bytes is None:
        return True
    free = job.capacity_bytes - job.model_bytes
    return free >= job.weight_bytes * numel
