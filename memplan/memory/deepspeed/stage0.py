"""Stage 0: nothing is sharded (``FP16_Optimizer``, runtime/fp16/fused_optimizer.py, also for bf16).

Legend: W bytes of a weight, Φ trained parameters. Held: WΦ flat weights, 4Φ master weights, the
optimizer's states, made at once. After backward the gradients are all-reduced through a copy of at
most 5e8 elements and one parameter more (engine.py, ``buffered_allreduce_fallback``); the bucket
sizes of ``zero_optimization`` have no part in it.
"""

from collections.abc import Sequence

from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.timeline import BackwardTimeline

ALLREDUCE_BUCKET = 500_000_000
"""Elements of the engine's own bucket; a constant of engine.py."""


def allreduce_bucket_numel(numels: Sequence[int], limit: int = ALLREDUCE_BUCKET) -> int:
    """The largest bucket: parameters in order until there are more than ``limit`` [elements].

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


def backward_peak(
    timeline: BackwardTimeline, *, carried_bytes: int, gradients_bytes: int, bucket_bytes: int
) -> Peak:
    """Gradients stay; then they are all-reduced bucket by bucket.

    ``carried_bytes`` are gradients of earlier micro-steps, to which the new ones are added.
    """
    peak = Peak()
    finished = 0
    for moment in timeline.moments:
        kept = carried_bytes or finished
        peak.offer(moment.peak_bytes, gradients=kept + moment.waiting_bytes, moment=moment)
        finished += moment.gradient_bytes
    last = timeline.moments[-1]
    peak.offer(
        last.end_bytes,
        gradients=gradients_bytes,
        buckets=bucket_bytes,
        moment=last,
        at_end=True,
    )
    return peak
