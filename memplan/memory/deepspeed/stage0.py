"""Stage 0: nothing is sharded, and the wrapper is one of two, for fp16 and bf16 alike.

Legend: W bytes of a weight, Φ trained parameters. Held by both: WΦ weights, 4Φ master weights and
the optimizer's states, which are made at once. After backward the gradients are all-reduced through
a copy of at most 5e8 elements and one parameter more (engine.py, ``buffered_allreduce_fallback``),
which is cast where gradients travel in another dtype; the bucket sizes of ``zero_optimization`` have
no part in it.

DeepSpeed's own FusedAdam gets ``FP16_Optimizer`` (runtime/fp16/fused_optimizer.py), with everything
flat: the step casts every gradient to fp32 and then flattens the casts, with the gradients still
there. Any other optimizer, among them PyTorch's AdamW, which HF Trainer brings where the file has no
optimizer section, gets ``FP16_UnfusedOptimizer`` (runtime/fp16/unfused_optimizer.py): each parameter
has a master weight of its own, the step casts each gradient to fp32 (4Φ) and updates, and the first
step at start-up has zero gradients in both dtypes. In fp32 there is no wrapper: parameters and
gradients are the optimizer's own.
"""

from collections.abc import Sequence
from functools import lru_cache

from memplan.errors import SetupError
from memplan.memory.account import ComponentKind, Entry, HostMemory, RankAccount, make_phase
from memplan.memory.deepspeed.host import saved_bytes, writer_bytes
from memplan.memory.deepspeed.job import MASTER_BYTES, Job, rounded
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
from memplan.training.optimizers import Optimizer

ALLREDUCE_BUCKET = 500_000_000
"""Elements of the engine's own bucket; a constant of engine.py."""


def replicated_account(job: Job) -> RankAccount:
    """Every rank holds everything.

    Raises ``SetupError`` for gradients that accumulate in another dtype than the weights', which
    the engine refuses without ZeRO.
    """
    if job.accumulates_apart:
        msg = (
            "engine_options: grad_accum_dtype must be the weights' in ZeRO stage 0: DeepSpeed "
            "refuses another one without ZeRO; use stage 1 or leave it out"
        )
        raise SetupError(msg)
    held = _held(job)
    carried = job.trained_bytes if job.accumulates else 0
    forward = Peak()
    height = job.forward_height
    forward.offer(height.total_bytes, gradients=carried, height=height)
    backward = backward_peak(
        job,
        carried_bytes=carried,
        gradients_bytes=job.trained_bytes,
        bucket_bytes=_allreduce_bytes(job),
    )
    phases = (
        make_phase("load", [*held, *_first_step(job)]),
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
            writer_bytes=writer_bytes(job, part_numel=job.weights.num_trained),
        ),
    )


def is_flat(job: Job) -> bool:
    """Whether the wrapper is ``FP16_Optimizer`` (engine.py, ``_configure_fp16_optimizer``)."""
    own = job.given.setup.optimizer is Optimizer.ADAMW_FUSED and not job.options.torch_adam
    return own and job.given.formats.master_weights


def _fp32_bytes(job: Job) -> int:
    """An fp32 tensor of all trained parameters, or one for each."""
    numels = job.weights.trained_numels
    if is_flat(job):
        return rounded(MASTER_BYTES * sum(numels))
    return sum(rounded(MASTER_BYTES * numel) for numel in numels)


def _held(job: Job) -> list[Entry]:
    fp32 = _fp32_bytes(job)
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
    """What the step holds beside the gradients: they stay until it is over."""
    fp32 = _fp32_bytes(job) if job.given.formats.master_weights else 0
    copies = job.step_copies_bytes * job.weights.num_trained
    # Two flat copies for a moment; or the casts alone, with what the update itself copies.
    flattening = 2 * fp32 if is_flat(job) else 0
    return [
        Entry(ComponentKind.GRADIENTS, job.trained_bytes, "one for each parameter"),
        Entry(
            ComponentKind.TEMPORARIES,
            max(flattening, fp32 + copies),
            "gradients cast to fp32, then flattened" if flattening else "gradients cast to fp32",
        ),
    ]


def _first_step(job: Job) -> list[Entry]:
    """Zero gradients for the step that makes the states."""
    zeros = Entry(
        ComponentKind.GRADIENTS, _fp32_bytes(job), "fp32 zeros for the step that makes the states"
    )
    if is_flat(job) or not job.given.formats.master_weights:
        return [zeros]
    own = Entry(ComponentKind.GRADIENTS, job.trained_bytes, "zeros in the weights' dtype too")
    return [zeros, own]


def _allreduce_bytes(job: Job) -> int:
    """The copies through which a bucket is all-reduced: flat, and cast."""
    numels = job.weights.trained_numels
    flat = job.weight_bytes * allreduce_bucket_numel(numels)
    if job.communication_bytes == job.weight_bytes:
        return flat
    whole = allreduce_bucket_numel(numels, copies_one=True)
    both = (job.weight_bytes + job.communication_bytes) * allreduce_bucket_numel(numels)
    return max(both, job.communication_bytes * whole)


def allreduce_bucket_numel(
    numels: Sequence[int], limit: int = ALLREDUCE_BUCKET, *, copies_one: bool = False
) -> int:
    """The largest bucket: parameters in order until there are more than ``limit`` [elements].

    One parameter alone is not flattened, and counts only with ``copies_one``.

    >>> allreduce_bucket_numel([3, 3, 3, 1], limit=5)
    6
    """
    largest = filled = count = 0
    for numel in numels:
        filled += numel
        count += 1
        if filled > limit:
            largest = max(largest, filled if count > 1 or copies_one else 0)
            filled = count = 0
    return max(largest, filled if count > 1 or copies_one else 0)


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
