"""Stages 1 and 2: gradients through buckets (runtime/zero/stage_1_and_2.py).

At the first gradient of a backward pass one bucket is allocated, two with ``overlap_comm``. Stage 2
(and stage 1 with ``overlap_comm``) moves each gradient into the bucket as it comes; stage 1 lets all
of them accumulate and reduces afterwards, in the order of the parameters. A full bucket is reduced
through a second, flat copy (``allreduce_bucket``), but for one whose gradients all belong to one
rank: flattening one tensor is no copy. Then the gradients of parameters that touch this rank's part
move into a buffer of their own, which is allocated whole at the first of them, and the rest is let
go. A gradient larger than the bucket stays where it is until the next reduction.
"""

from collections.abc import Sequence

from memplan.graph.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.partition import FlatPartition
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.timeline import BackwardTimeline, Moment
from memplan.records import dataclass

NORM_BYTES = 8
"""Bytes of an element while a gradient's norm is taken: fp64 (runtime/utils.py,
``get_norm_dtype``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSettings:
    """How stages 1 and 2 reduce gradients."""

    bucket_numel: int
    num_buckets: int
    """2 with ``overlap_comm``."""
    element_bytes: int
    """Of a gradient as it is reduced."""
    keeps_all: bool
    """Stage 1: a gradient that is not this rank's is let go only when the epilogue runs."""
    offloads: bool
    """This rank's gradients go to the CPU at every reduction."""
    owned_bytes: int
    """The buffer of this rank's gradients: whole parameters (0 with offload)."""
    slice_copy_bytes: int
    """Bytes per element by which a reduced slice is copied into an fp32 buffer; 0 without one."""

    @property
    def buckets_bytes(self) -> int:
        """All buckets."""
        size = self.bucket_numel * self.element_bytes
        return self.num_buckets * (-(-size // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING)


class Reduction:
    """The engine's bucket during the last backward pass before an optimizer step."""

    def __init__(
        self, settings: ReductionSettings, partition: FlatPartition, numels: Sequence[int]
    ) -> None:
        self.settings = settings
        self.partition = partition
        self.numels = numels
        self.filled = 0
        """Elements in the bucket."""
        self.waiting: list[int] = []
        """Their parameters."""
        self.one_rank = -1
        """The rank whose part holds all of them; -2 where there is none such."""
        self.large_bytes = 0
        """A gradient larger than the bucket, in its own memory."""
        self.stale_bytes = 0
        """Such gradients that stage 1 does not let go."""
        self.owned_bytes = 0
        """This rank's gradients, once their buffer is allocated."""
        self.unreduced_bytes = 0
        """Gradients in their own memory that have not come to the bucket yet: those that wait for
        the end of backward, or of earlier micro-steps."""

    @property
    def gradients_bytes(self) -> int:
        """Every gradient outside the buckets."""
        return self.owned_bytes + self.large_bytes + self.stale_bytes + self.unreduced_bytes

    def add(self, weight: int, gradient_bytes: int, peak: Peak, moment: Moment) -> None:
        """Take a gradient, reducing what is there where it does not fit in."""
        numel = self.numels[weight]
        if self.filled + numel > self.settings.bucket_numel:
            self.reduce(gradient_bytes, peak, moment)
        if numel > self.settings.bucket_numel:
            self.large_bytes = gradient_bytes
        if self.waiting:
            if self.partition.last_rank[weight] != self.one_rank:
                self.one_rank = -2
        else:
            self.one_rank = self.partition.last_rank[weight]
        if self.partition.first_rank[weight] != self.one_rank:
            self.one_rank = -2
        self.waiting.append(weight)
        self.filled += numel

    def reduce(self, arriving_bytes: int, peak: Peak, moment: Moment) -> None:
        """Reduce what waits; ``arriving_bytes`` is the gradient that did not fit."""
        if not self.waiting:
            return
        settings = self.settings
        copy = self._flat_copy_numel() * settings.element_bytes
        level = moment.end_bytes
        largest = self._largest_owned_slice()
        if largest and settings.slice_copy_bytes:
            self.owned_bytes = settings.owned_bytes
        held = self.gradients_bytes + arriving_bytes + moment.waiting_bytes
        extra = largest * settings.slice_copy_bytes
        self._offer(peak, moment, level, held, copy, extra)
        if largest:
            self._take_owned(level, held, largest, peak, moment)
        if self.large_bytes:
            if settings.keeps_all and not largest:
                self.stale_bytes += self.large_bytes
            self.large_bytes = 0
        self.waiting = []
        self.filled = 0

    def _take_owned(self, level: int, held: int, largest: int, peak: Peak, moment: Moment) -> None:
        settings = self.settings
        if settings.offloads:
            self._offer(peak, moment, level, held, 0, largest * NORM_BYTES)
            return
        if not self.owned_bytes:
            self.owned_bytes = settings.owned_bytes
            self._offer(peak, moment, level, held + self.owned_bytes, 0, 0)

    def _offer(
        self, peak: Peak, moment: Moment, level: int, held: int, copy: int, extra: int
    ) -> None:
        peak.offer(
            level,
            gradients=held,
            buckets=self.settings.buckets_bytes + copy,
            temporaries=extra,
            moment=moment,
            at_end=True,
        )

    def _largest_owned_slice(self) -> int:
        return max((self.partition.slice_numel(index) for index in self.waiting), default=0)

    def _flat_copy_numel(self) -> int:
        """Elements of the flat copy: none for a single slice; more than a bucket goes in parts."""
        if self.one_rank >= 0:
            return 0
        if self.filled <= self.settings.bucket_numel:
            return self.filled
        largest = filled = count = 0
        for piece in self.partition.cuts(self.waiting[0]):
            filled += piece
            count += 1
            if filled > self.settings.bucket_numel:
                largest = max(largest, filled if count > 1 else 0)
                filled = count = 0
        return max(largest, filled if count > 1 else 0)


def reduce_while_backward(
    timeline: BackwardTimeline,
    settings: ReductionSettings,
    partition: FlatPartition,
    numels: Sequence[int],
    *,
    carried_bytes: int,
    carried_buckets_bytes: int,
    gradients_added: bool,
    peak: Peak | None = None,
) -> Peak:
    """Gradients move into the bucket as they come.

    ``carried_bytes`` are gradients of earlier micro-steps. With ``gradients_added`` the new ones
    are added to them one by one (stage 1), and leave with them. ``peak`` takes the offers.
    """
    peak = Peak() if peak is None else peak
    reduction = Reduction(settings, partition, numels)
    reduction.unreduced_bytes = carried_bytes
    buckets = carried_buckets_bytes
    for moment in timeline.moments:
        peak.offer(
            moment.peak_bytes,
            gradients=reduction.gradients_bytes + moment.waiting_bytes,
            buckets=buckets,
            moment=moment,
        )
        if moment.weight >= 0:
            if gradients_added:
                reduction.unreduced_bytes -= moment.gradient_bytes
            if not buckets:
                buckets = settings.buckets_bytes
                _offer_allocation(peak, moment, reduction.gradients_bytes, buckets)
            reduction.add(moment.weight, moment.gradient_bytes, peak, moment)
    reduction.reduce(0, peak, timeline.moments[-1])
    return peak


def reduce_after_backward(
    timeline: BackwardTimeline,
    settings: ReductionSettings,
    partition: FlatPartition,
    numels: Sequence[int],
    *,
    carried: bool,
    gradient_sizes: list[int],
    peak: Peak | None = None,
) -> Peak:
    """Stage 1 without overlap: all gradients accumulate first.

    ``carried``: they and the bucket are there from earlier micro-steps. ``gradient_sizes``: bytes of
    each parameter's gradient, 0 where it has none. ``peak`` takes the offers.
    """
    peak = Peak() if peak is None else peak
    total = sum(gradient_sizes)
    finished = total if carried else 0
    buckets = settings.buckets_bytes if carried else 0
    for moment in timeline.moments:
        peak.offer(
            moment.peak_bytes,
            gradients=finished + moment.waiting_bytes,
            buckets=buckets,
            moment=moment,
        )
        if moment.weight >= 0:
            if not buckets:
                buckets = settings.buckets_bytes
                _offer_allocation(peak, moment, finished, buckets)
            if not carried:
                finished += moment.gradient_bytes
    last = timeline.moments[-1]
    peak.offer(last.end_bytes, gradients=total, buckets=buckets, moment=last, at_end=True)
    _reduce_in_order(Reduction(settings, partition, numels), gradient_sizes, peak, last)
    return peak


def _reduce_in_order(
    reduction: Reduction, gradient_sizes: list[int], peak: Peak, last: Moment
) -> None:
    """Every gradient through the bucket, in the order of the parameters."""
    partition = reduction.partition
    reduction.unreduced_bytes = sum(gradient_sizes)
    for weight in partition.order:
        size = gradient_sizes[weight]
        if size:
            reduction.unreduced_bytes -= size
            reduction.add(weight, size, peak, last)
    reduction.reduce(0, peak, last)


def _offer_allocation(peak: Peak, moment: Moment, gradients_bytes: int, buckets_bytes: int) -> None:
    """The buckets are allocated while the first gradient is still in its own memory."""
    peak.offer(
        moment.end_bytes,
        gradients=gradients_bytes + moment.gradient_bytes + moment.waiting_bytes,
        buckets=buckets_bytes,
        moment=moment,
        at_end=True,
    )
