"""How stages 1 and 2 reduce gradients (runtime/zero/stage_1_and_2.py).

Stage 2 (and stage 1 with ``overlap_comm``) moves each gradient into the bucket as it comes; stage 1
lets all of them accumulate and reduces afterwards, in the order of the parameters. Where they
accumulate in another dtype than the weights', stage 1 first casts each one, as it comes, to a
``param.grad_accum`` of its own, and the bucket takes that.

A full bucket is summed over the ranks through a second, flat copy (``allreduce_bucket``), but for
one whose gradients all belong to one rank: flattening one tensor is no copy. Where gradients travel
in another dtype (``communication_data_type``), the flat copy is cast too, and both are there at
once. Then the gradients of parameters that touch this rank's part move into a buffer of their own,
and the rest is let go. That buffer holds whole parameters and is allocated at the first of them; in
fp32 over 16-bit weights it holds this rank's part alone (``_build_compact_grad_partition_buffer``),
is on the GPU even where the optimizer is not, and stays over micro-steps. A gradient larger than the
bucket stays where it is until the next reduction.

Stage 1 lets a reduced ``param.grad_accum`` of another rank go only in the step, or where the
optimizer is on the CPU after it: until then those larger than the bucket stay, and so does a bucket
that smaller ones are views of.
"""

from memplan.fast_dataclass import dataclass
from memplan.memory.deepspeed.job import Job, rounded
from memplan.memory.deepspeed.partition import FlatPartition
from memplan.training.choices import ZeroStage

NORM_BYTES = 8
"""Bytes of an element while a gradient's norm is taken: fp64 (runtime/utils.py,
``get_norm_dtype``)."""
COMPACT_BYTES = 4
"""Bytes of an element of the buffer that holds this rank's part alone: fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSettings:
    """How stages 1 and 2 reduce gradients."""

    bucket_numel: int
    num_buckets: int
    """2 with ``overlap_comm``."""
    element_bytes: int
    """Of a gradient in the bucket."""
    communication_bytes: int
    """Of a gradient on its way between the ranks."""
    casts: bool
    """Each gradient is cast to the bucket's dtype as it comes (stage 1, ``param.grad_accum``)."""
    offloads: bool
    """This rank's gradients go to the CPU at every reduction."""
    scatters: bool
    """Buckets are summed piece by piece, through a flat copy."""
    compact: bool
    """This rank's gradients have an fp32 buffer of its part's size; what is reduced is added."""
    owned_element_bytes: int
    """The buffer of a rank's own gradients: of an element of its parameters, whole (0 where they go
    to the CPU at once)."""
    owned_part_bytes: int
    """The same buffer where it holds the rank's part alone."""

    @property
    def bucket_bytes(self) -> int:
        """One of them."""
        return rounded(self.bucket_numel * self.element_bytes)


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
        offloads=job.offloads_optimizer,
        scatters=options.reduce_scatter,
        compact=compact,
        owned_element_bytes=job.weight_bytes if keeps_whole else 0,
        owned_part_bytes=rounded(COMPACT_BYTES * partition.size) if compact else 0,
    )


def flattens_on_gpu(job: Job, numel: int) -> bool:
    """Whether the GPU has room for the weights and their flat copy."""
    if job.capacity_bytes is None:
        return True
    free = job.capacity_bytes - job.model_bytes
    return free >= job.weight_bytes * numel
