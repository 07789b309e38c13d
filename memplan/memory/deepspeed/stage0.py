"""Stage 0: nothing is sharded (``FP16_Optimizer``, runtime/fp16/fused_optimizer.py, also for bf16).

Legend: W bytes of a weight, Φ trained parameters. Held: WΦ flat weights, 4Φ master weights and the
optimizer's states, which are made at once. After backward the gradients are all-reduced through a
copy of at most 5e8 elements and one parameter more (engine.py, ``buffered_allreduce_fallback``); the
bucket sizes of ``zero_optimization`` have no part in it. The step casts every gradient to fp32 and
then flattens the casts, with the gradients still there. In fp32 there is no wrapper: parameters and
gradients are the optimizer's own.
"""

from collections.abc import Sequence
from functools import lru_cache

from memplan.memory.account import ComponentKind, Entry, HostMemory, RankAccount, make_phase
from memplan.memory.deepspeed.host import saved_bytes
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.recording import (
    REMEMBERED,
    Keyed,
    Offer,
    Recording,
    candidates,
    highest,
)
from memplan.memory.deepspeed.timeline import BackwardTimeline

ALLREDUCE_BUCKET = 500_000_000
"""Elements of the engine's own bucket; a constant of engine.py."""


def replicated_account(job: Job) -> RankAccount:
    """Every rank holds everything."""
    held = _held(job)
    carried = job.trained_bytes if job.accumulates else 0
    forward = Peak()
    height = job.forward_height
    forward.offer(height.total_bytes, gradients=carried, height=height)
    backward = backward_peak(
        job,
        carried_bytes=carried,
        gradients_bytes=job.trained_bytes,
        bucket_bytes=job.weight_bytes * allreduce_bucket_numel(job.weights.trained_numels),
    )
    phases = (
        make_phase("load", [*held, _first_step(job)]),
        job.peak_phase("forward", held, forward),
        job.peak_phase("backward", held, backward),
        job.phase("step", held, *_step(job)),
        job.phase("save", held),
    )
    return RankAccount(
        rank=job.rank,
        phases=phases,
        held_bytes=job.phase("held", held).peak_bytes,
        host=HostMemory(
            load_bytes=job.model_bytes,
            save_bytes=saved_bytes(job, part_numel=job.weights.num_trained),
        ),
    )


def _held(job: Job) -> list[Entry]:
    fp32 = MASTER_BYTES * job.weights.num_trained
    return [
        Entry(ComponentKind.PARAMETERS, job.model_bytes, "every weight, on every rank"),
        Entry(
            ComponentKind.MASTER_WEIGHTS,
            fp32 if job.given.formats.master_weights else 0,
            "an fp32 copy of each trained parameter",
        ),
        Entry(
            ComponentKind.OPTIMIZER_STATES,
            job.num_states * fp32,
            f"{job.num_states} x fp32 a parameter",
        ),
    ]


def _step(job: Job) -> list[Entry]:
    numel = job.weights.num_trained
    casts = 2 * MASTER_BYTES * numel if job.given.formats.master_weights else 0
    return [
        Entry(ComponentKind.GRADIENTS, job.trained_bytes, "one for each parameter"),
        Entry(
            ComponentKind.TEMPORARIES,
            max(casts, casts // 2 + job.step_copies_bytes * numel),
            "gradients cast to fp32, then flattened",
        ),
    ]


def _first_step(job: Job) -> Entry:
    return Entry(
        ComponentKind.GRADIENTS,
        MASTER_BYTES * job.weights.num_trained,
        "fp32 zeros for the step that makes the states",
    )


def allreduce_bucket_numel(numels: Sequence[int], limit: int = ALLREDUCE_BUCKET) -> int:
    """The largest bucket: parameters in order until there are more than ``limit`` [elements].

    One parameter alone is not copied.

    >>> allreduce_bucket_numel([3, 3, 3, 1], limit=5)
    6
    """
    largest = filled = count = 0
    for numel in numels:
        filled += numel
        count += 1
        if filled > limit:
            largest = max(largest, filled if count > 1 else 0)
            filled = count = 0
    return max(largest, filled if count > 1 else 0)


def backward_peak(job: Job, *, carried_bytes: int, gradients_bytes: int, bucket_bytes: int) -> Peak:
    """Gradients stay; then they are all-reduced bucket by bucket.

    ``carried_bytes`` are gradients of earlier micro-steps, to which the new ones are added.
    """
    timeline = Keyed(job.timeline, job.shape)
    return highest(_offers(timeline, carried_bytes, gradients_bytes, bucket_bytes), job.timeline)


@lru_cache(maxsize=REMEMBERED)
def _offers(
    timeline: Keyed[BackwardTimeline], carried_bytes: int, gradients_bytes: int, bucket_bytes: int
) -> tuple[Offer, ...]:
    peak = Recording(timeline.value)
    finished = 0
    for moment in timeline.value.moments:
        kept = carried_bytes or finished
        peak.offer(moment.peak_bytes, gradients=kept + moment.waiting_bytes, moment=moment)
        finished += moment.gradient_bytes
    last = timeline.value.moments[-1]
    peak.offer(
        last.end_bytes,
        gradients=gradients_bytes,
        buckets=bucket_bytes,
        moment=last,
        at_end=True,
    )
    return candidates(peak, timeline.value)
