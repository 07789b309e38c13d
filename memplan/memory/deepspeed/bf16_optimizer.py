"""Stage 1 with fp32 accumulation in bf16: ``BF16_Optimizer`` (runtime/bf16_optimizer.py).

Legend: Φ trained parameters, P one rank's part, n the largest parameter. The engine takes this
wrapper in place of ZeRO's where ``grad_accum_dtype`` is fp32 and nothing is offloaded. Held: 2Φ
weights, 4Φ fp32 gradients that are never let go, 4P master weights and the states. Backward leaves
2Φ bf16 gradients; each is then cast to fp32 and added (4n), and all fp32 gradients are cast at once
to the dtype in which they are summed over the ranks (2Φ; none where that is fp32).
"""

from memplan.memory.account import ComponentKind, Entry, HostMemory, RankAccount, make_phase
from memplan.memory.deepspeed.host import saved_bytes, writer_bytes
from memplan.memory.deepspeed.job import MASTER_BYTES, Job, rounded
from memplan.memory.deepspeed.partition import FlatPartition
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.stage0 import backward_peak


def uses_bf16_optimizer(job: Job) -> bool:
    """Whether stage 1 runs with this wrapper (engine.py, ``_do_optimizer_sanity_check``)."""
    bf16 = job.given.formats.weights.label == "bf16"
    return bf16 and job.gradient_bytes == MASTER_BYTES and not job.offloads_optimizer


def bf16_optimizer_account(job: Job) -> RankAccount:
    """The account of stage 1 with fp32 accumulation."""
    partition = job.partition(round_robin=False)
    flat = job.weight_bytes * partition.numel
    made = _made(job, partition)
    part = rounded(MASTER_BYTES * partition.size)
    states = Entry(
        ComponentKind.OPTIMIZER_STATES,
        job.num_states * part,
        f"{job.num_states} x fp32 of the same part",
    )
    held = [*made, states]
    copies = Entry(
        ComponentKind.TEMPORARIES,
        job.step_copies_bytes * partition.size,
        "copies the optimizer makes of a state",
    )
    gradients = 0 if job.options.immediate_grad_update else job.trained_bytes
    left = Entry(ComponentKind.GRADIENTS, gradients, "bf16, as backward left them")
    phases = (
        make_phase("load", _load(job, made, flat)),
        job.peak_phase("forward", held, _forward(job, gradients)),
        job.peak_phase("backward", held, _backward(job, _cast_bytes(job, partition), gradients)),
        job.phase("step", held, left, copies),
        job.phase("save", held),
    )
    return RankAccount(
        rank=job.rank,
        phases=phases,
        held_bytes=job.phase("held", held).peak_bytes,
        host=HostMemory(
            load_bytes=job.model_bytes,
            save_bytes=saved_bytes(job, part_numel=partition.size),
            writer_bytes=writer_bytes(job, part_numel=partition.size),
        ),
    )


def _made(job: Job, partition: FlatPartition) -> list[Entry]:
    """What is there once the engine is set up."""
    flat = job.weight_bytes * partition.numel + job.frozen_bytes
    return [
        Entry(ComponentKind.PARAMETERS, flat, "every weight, on every rank"),
        Entry(
            ComponentKind.GRADIENTS,
            MASTER_BYTES * partition.numel,
            "fp32, one for each parameter, kept between steps",
        ),
        Entry(
            ComponentKind.MASTER_WEIGHTS,
            rounded(MASTER_BYTES * partition.size),
            "fp32, this rank's part",
        ),
    ]


def _load(job: Job, made: list[Entry], flat_bytes: int) -> list[Entry]:
    """Two copies of the weights while they are flattened, or everything at the end."""
    if sum(entry.num_bytes for entry in made[1:]) >= job.trained_bytes:
        return made
    copy = Entry(ComponentKind.TEMPORARIES, job.trained_bytes, "the weights before flattening")
    return [Entry(ComponentKind.PARAMETERS, flat_bytes + job.frozen_bytes), copy]


def _forward(job: Job, gradients_bytes: int) -> Peak:
    peak = Peak()
    height = job.forward_height
    carried = gradients_bytes if job.accumulates else 0
    peak.offer(height.total_bytes, gradients=carried, height=height)
    return peak


def _cast_bytes(job: Job, partition: FlatPartition) -> int:
    """All fp32 gradients, cast on their way between the ranks (engine.py, ``allreduce_bucket``)."""
    is_cast = job.communication_bytes != MASTER_BYTES
    return job.communication_bytes * partition.numel if is_cast else 0


def _backward(job: Job, cast_bytes: int, gradients_bytes: int) -> Peak:
    largest = MASTER_BYTES * job.weights.largest_trained
    if not gradients_bytes:
        return _immediate(job, cast_bytes)
    return backward_peak(
        job,
        carried_bytes=gradients_bytes if job.accumulates else 0,
        gradients_bytes=gradients_bytes,
        bucket_bytes=max(cast_bytes, largest),
    )


def _immediate(job: Job, cast_bytes: int) -> Peak:
    """Each gradient is cast, added and let go as it comes."""
    peak = Peak()
    for moment in job.timeline.moments:
        peak.offer(moment.peak_bytes, gradients=moment.waiting_bytes, moment=moment)
        if moment.weight >= 0:
            peak.offer(
                moment.end_bytes,
                gradients=moment.gradient_bytes + moment.waiting_bytes,
                temporaries=2 * moment.gradient_bytes,
                moment=moment,
                at_end=True,
            )
    last = job.timeline.moments[-1]
    peak.offer(last.end_bytes, buckets=cast_bytes, moment=last, at_end=True)
    return peak
