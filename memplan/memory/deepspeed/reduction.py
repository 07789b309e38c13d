"""Stages 1 and 2: gradients through buckets (runtime/zero/stage_1_and_2.py).

At the first gradient of a backward pass one bucket is allocated, two with ``overlap_comm``. Stage 2
(and stage 1 with ``overlap_comm``) moves each gradient into the bucket as it comes; stage 1 lets all
of them accumulate and reduces afterwards, in the order of the parameters. A full bucket is reduced
through a second, flat copy (``allreduce_bucket``), but for one whose gradients all belong to one
rank: flattening one tensor is no copy. Then the gradients of parameters that touch this rank's part
move into a buffer of their own, which is allocated whole at the first of them, and the rest is let
go. A gradient larger than the bucket stays where it is until the next reduction.
"""

from memplan.graph.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.kept import KeptGradients
from memplan.memory.deepspeed.partition import FlatBuffer, RankKinds
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
    """A rank's own gradients go to the CPU at every reduction."""
    owned_element_bytes: int
    """The buffer of a rank's own gradients: of an element of its parameters, whole."""
    owned_part_bytes: int
    """The same buffer where it is flat: as large as the rank's part, whatever lies in it."""
    slice_copy_bytes: int
    """Bytes per element by which a reduced slice is copied into an fp32 buffer; 0 without one."""

    @property
    def buckets_bytes(self) -> int:
        """All buckets."""
        size = self.bucket_numel * self.element_bytes
        return self.num_buckets * (-(-size // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING)

    def owned_bytes(self, whole_numel: int) -> int:
        """The buffer of a rank's own gradients, whose parameters have so many elements."""
        return self.owned_part_bytes + self.owned_element_bytes * whole_numel


class Reduction:
    """The engine's bucket during the last backward pass before an optimizer step.

    Every rank's bucket fills and empties alike; what a rank keeps of it is its own. So any number
    of ranks go through one replay, and each offer is of the one that holds most at that moment.
    """

    def __init__(
        self,
        settings: ReductionSettings,
        buffer: FlatBuffer,
        ranks: RankKinds,
        *,
        carries_owned: bool = False,
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.numels = buffer.numels
        owned = [settings.owned_bytes(kind.whole_numel) for kind in ranks.kinds]
        self.kept = KeptGradients(ranks, owned, carries_owned=carries_owned)
        self.filled = 0
        """Elements in the bucket."""
        self.waiting: list[int] = []
        """Their parameters."""
        self.one_rank = -1
        """The rank whose part holds all of them; -2 where there is none such."""
        self.large_bytes = 0
        """A gradient larger than the bucket, in its own memory."""
        self.unreduced_bytes = 0
        """Gradients in their own memory that have not come to the bucket yet: those that wait for
        the end of backward, or of earlier micro-steps."""

    @property
    def gradients_bytes(self) -> int:
        """Every gradient outside the buckets, of the rank with most of them."""
        return self.large_bytes + self.kept.fullest_bytes + self.unreduced_bytes

    def add(self, weight: int, gradient_bytes: int, peak: Peak, moment: Moment) -> None:
        """Take a gradient, reducing what is there where it does not fit in."""
        numel = self.numels[weight]
        if self.filled + numel > self.settings.bucket_numel:
            self.reduce(gradient_bytes, peak, moment)
        if numel > self.settings.bucket_numel:
            self.large_bytes = gradient_bytes
        if self.waiting:
            if self.buffer.last_rank[weight] != self.one_rank:
                self.one_rank = -2
        else:
            self.one_rank = self.buffer.last_rank[weight]
        if self.buffer.first_rank[weight] != self.one_rank:
            self.one_rank = -2
        self.waiting.append(weight)
        self.filled += numel

    def reduce(self, arriving_bytes: int, peak: Peak, moment: Moment) -> None:
        """Reduce what waits; ``arriving_bytes`` is the gradient that did not fit."""
        if not self.waiting:
            return
        settings, kept = self.settings, self.kept
        copy = self._flat_copy_numel() * settings.element_bytes
        owners = kept.owners(self.waiting)
        if settings.slice_copy_bytes:
            for number in owners:
                kept.allocate(number)
        others = self.large_bytes + self.unreduced_bytes + arriving_bytes + moment.waiting_bytes
        self._offer(peak, moment, others + kept.fullest_bytes, copy, 0, kept.fullest_rank)
        for number, largest in owners.items():
            rank, held = kept.rank(number), others + kept.bytes_of(number)
            if settings.slice_copy_bytes:
                self._offer(peak, moment, held, copy, largest * settings.slice_copy_bytes, rank)
            if settings.offloads:
                self._offer(peak, moment, held, 0, largest * NORM_BYTES, rank)
            elif kept.allocate(number):
                self._offer(peak, moment, others + kept.bytes_of(number), 0, 0, rank)
        if self.large_bytes:
            if settings.keeps_all:
                kept.linger(self.large_bytes, besides=owners)
            self.large_bytes = 0
        self.waiting = []
        self.filled = 0

    def _offer(
        self, peak: Peak, moment: Moment, held: int, copy: int, extra: int, rank: int
    ) -> None:
        peak.offer(
            moment.end_bytes,
            gradients=held,
            buckets=self.settings.buckets_bytes + copy,
            temporaries=extra,
            moment=moment,
            at_end=True,
            rank=rank,
        )

    def _flat_copy_numel(self) -> int:
        """Elements of the flat copy: none for a single slice; more than a bucket goes in parts."""
        if self.one_rank >= 0:
            return 0
        if self.filled <= self.settings.bucket_numel:
            return self.filled
        largest = filled = count = 0
        for piece in self.buffer.cuts(self.waiting[0]):
            filled += piece
            count += 1
            if filled > self.settings.bucket_numel:
                largest = max(largest, filled if count > 1 else 0)
                filled = count = 0
        return max(largest, filled if count > 1 else 0)


def reduce_while_backward(
    timeline: BackwardTimeline,
    settings: ReductionSettings,
    buffer: FlatBuffer,
    ranks: RankKinds,
    *,
    carries_owned: bool,
    carried_bytes: int,
    carried_buckets_bytes: int,
    peak: Peak,
) -> None:
    """Gradients move into the bucket as they come.

    Earlier micro-steps leave each rank's own gradients (``carries_owned``: stage 2), or
    ``carried_bytes`` of all, to which the new ones are added one by one and leave with them (stage 1).
    ``peak`` takes the offers.
    """
    reduction = Reduction(settings, buffer, ranks, carries_owned=carries_owned)
    reduction.unreduced_bytes = carried_bytes
    buckets = carried_buckets_bytes
    for moment in timeline.moments:
        peak.offer(
            moment.peak_bytes,
            gradients=reduction.gradients_bytes + moment.waiting_bytes,
            buckets=buckets,
            moment=moment,
            rank=reduction.kept.fullest_rank,
        )
        if moment.weight >= 0:
            if carried_bytes:
                reduction.unreduced_bytes -= moment.gradient_bytes
            if not buckets:
                buckets = settings.buckets_bytes
                rank = reduction.kept.fullest_rank
                _offer_allocation(peak, moment, reduction.gradients_bytes, buckets, rank)
            reduction.add(moment.weight, moment.gradient_bytes, peak, moment)
    reduction.reduce(0, peak, timeline.moments[-1])


def reduce_after_backward(
    timeline: BackwardTimeline,
    settings: ReductionSettings,
    buffer: FlatBuffer,
    ranks: RankKinds,
    *,
    carried: bool,
    gradient_sizes: list[int],
    peak: Peak,
) -> None:
    """Stage 1 without overlap: all gradients accumulate first.

    ``carried``: they and the bucket are there from earlier micro-steps. ``gradient_sizes``: bytes of
    each parameter's gradient, 0 where it has none. ``peak`` takes the offers.
    """
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
    _reduce_in_order(Reduction(settings, buffer, ranks), gradient_sizes, peak, last)


def _reduce_in_order(
    reduction: Reduction, gradient_sizes: list[int], peak: Peak, last: Moment
) -> None:
    """Every gradient through the bucket, in the order of the parameters."""
    reduction.unreduced_bytes = sum(gradient_sizes)
    for weight in reduction.buffer.order:
        size = gradient_sizes[weight]
        if size:
            reduction.unreduced_bytes -= size
            reduction.add(weight, size, peak, last)
    reduction.reduce(0, peak, last)


def _offer_allocation(
    peak: Peak, moment: Moment, gradients_bytes: int, buckets_bytes: int, rank: int = 0
) -> None:
    """The buckets are allocated while the first gradient is still in its own memory."""
    peak.offer(
        moment.end_bytes,
        gradients=gradients_bytes + moment.gradient_bytes + moment.waiting_bytes,
        buckets=buckets_bytes,
        moment=moment,
        at_end=True,
        rank=rank,
    )
