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

from collections.abc import Iterable

from memplan.fast_dataclass import dataclass
from memplan.graph.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.kept import KeptGradients
from memplan.memory.deepspeed.partition import FlatBuffer, RankKinds
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.timeline import BackwardTimeline, Moment

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
    keeps_all: bool
    """Stage 1: a gradient that is not this rank's is let go only when the epilogue runs."""
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
    def buckets_bytes(self) -> int:
        """All buckets."""
        return self.num_buckets * self.bucket_bytes

    @property
    def bucket_bytes(self) -> int:
        """One of them."""
        return _rounded(self.bucket_numel * self.element_bytes)

    def owned_bytes(self, whole_numel: int) -> int:
        """The buffer of a rank's own gradients, whose parameters have so many elements."""
        return self.owned_part_bytes + self.owned_element_bytes * whole_numel

    def gradient_bytes(self, numel: int, made_bytes: int) -> int:
        """A gradient that waits for the bucket; ``made_bytes``: as autograd made it."""
        return _rounded(numel * self.element_bytes) if self.casts else made_bytes


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
        self.kept = KeptGradients(
            ranks, owned, carried=carries_owned, stays=carries_owned and settings.compact
        )
        self.filled = 0
        """Elements in the bucket."""
        self.waiting: list[int] = []
        """Their parameters."""
        self.one_rank = -1
        """The rank whose part holds all of them; -2 where there is none such."""
        self.large_bytes = 0
        """A gradient larger than the bucket, in its own memory."""
        self.bucket = 0
        """The number of the bucket that is filled."""
        self.unreduced_bytes = 0
        """Gradients in their own memory that have not come to the bucket yet: those that wait for
        the end of backward, or of earlier micro-steps."""

    @property
    def gradients_bytes(self) -> int:
        """Every gradient outside the buckets, of the rank with most of them."""
        return self.large_bytes + self.kept.fullest_bytes + self.unreduced_bytes

    @property
    def left_bytes(self) -> tuple[int, ...]:
        """For each kind of ranks, casts of other ranks' gradients, and buckets that they are views
        of, that the end of backward leaves."""
        kept = self.kept
        if not self.settings.casts:
            return (0,) * len(kept.owned)
        size = self.settings.bucket_bytes
        return tuple(
            kept.stale_bytes(number) + kept.num_viewed(number) * size
            for number in range(len(kept.owned))
        )

    def add(self, weight: int, gradient_bytes: int, peak: Peak, moment: Moment) -> None:
        """Take a gradient, reducing what is there where it does not fit in."""
        settings = self.settings
        numel = self.numels[weight]
        if self.filled + numel > settings.bucket_numel:
            self.reduce(gradient_bytes, peak, moment)
            self.bucket = (self.bucket + 1) % settings.num_buckets
        if numel > settings.bucket_numel:
            self.large_bytes = gradient_bytes
            if settings.offloads:
                # A clone of its own, since the copy to the CPU may still run when autograd goes on.
                held = self.gradients_bytes + gradient_bytes + moment.waiting_bytes
                self._offer(peak, moment, held, 0, 0, self.kept.fullest_rank)
        first, last = self.buffer.first_rank[weight], self.buffer.last_rank[weight]
        if not self.waiting:
            self.one_rank = last if first == last else -2
        elif first != self.one_rank or last != self.one_rank:
            self.one_rank = -2
        self.waiting.append(weight)
        self.filled += numel

    def reduce(self, arriving_bytes: int, peak: Peak, moment: Moment) -> None:
        """Reduce what waits; ``arriving_bytes`` is the gradient that did not fit."""
        if not self.waiting:
            return
        settings, kept = self.settings, self.kept
        owners = kept.owners(self.waiting)
        if settings.compact:
            for number in owners:
                kept.allocate(number)
        others = self.large_bytes + self.unreduced_bytes + arriving_bytes + moment.waiting_bytes
        copies, summed = self._copies(is_apart=False)
        self._offer(peak, moment, others + kept.fullest_bytes, copies, 0, kept.fullest_rank)
        for number, largest in owners.items():
            rank, held = kept.rank(number), others + kept.bytes_of(number)
            if settings.compact:
                copies, summed = self._copies(is_apart=self._is_apart(rank))
                self._offer(peak, moment, held, copies, 0, rank)
                if settings.communication_bytes != COMPACT_BYTES:
                    self._offer(peak, moment, held, summed, largest * COMPACT_BYTES, rank)
            if settings.offloads:
                self._offer(peak, moment, held, 0, largest * NORM_BYTES, rank)
            elif kept.allocate(number):
                self._offer(peak, moment, others + kept.bytes_of(number), 0, 0, rank)
        self._let_go(owners)
        self.waiting = []
        self.filled = 0

    def _is_apart(self, rank: int) -> bool:
        """Whether each of a rank's own gradients is a piece by itself, to be added to its buffer."""
        return self.one_rank == rank and len(self.waiting) > 1

    def _copies(self, *, is_apart: bool) -> tuple[int, int]:
        """Flat copy and cast at their highest, and what comes back of the sum [bytes].

        ``is_apart``: what waits is of one rank and yet more than one piece.
        """
        settings = self.settings
        is_cast = settings.communication_bytes != settings.element_bytes
        most = summed = 0
        for numel, is_copied in self._pieces(is_apart=is_apart):
            flat = numel * settings.element_bytes if is_copied and settings.scatters else 0
            cast = numel * settings.communication_bytes if is_cast else 0
            most = max(most, flat + cast)
            summed = max(summed, cast or flat)
        return most, summed

    def _let_go(self, owners: Iterable[int]) -> None:
        """Gradients that no name holds any more; what stays is a view of the bucket or stale."""
        settings, kept = self.settings, self.kept
        if self.large_bytes:
            if settings.keeps_all:
                kept.linger(self.large_bytes, besides=owners)
            elif settings.compact and not settings.offloads:
                kept.linger_with(owners, self.large_bytes)
            self.large_bytes = 0
        elif settings.casts:
            kept.view(self.bucket, self.waiting, owners)

    def _offer(
        self, peak: Peak, moment: Moment, held: int, copies: int, extra: int, rank: int
    ) -> None:
        peak.offer(
            moment.end_bytes,
            gradients=held,
            buckets=self.settings.buckets_bytes + copies,
            temporaries=extra,
            moment=moment,
            at_end=True,
            rank=rank,
        )

    def _pieces(self, *, is_apart: bool) -> Iterable[tuple[int, bool]]:
        """What is summed at once: elements, and whether they are more than one slice.

        A gradient larger than the bucket goes in parts that each reach the bucket's size.
        """
        if self.filled <= self.settings.bucket_numel:
            return [(self.filled, self.one_rank < 0 or is_apart)]
        parts: list[tuple[int, bool]] = []
        filled = count = 0
        for piece in self.buffer.cuts(self.waiting[0]):
            filled += piece
            count += 1
            if filled > self.settings.bucket_numel:
                parts.append((filled, count > 1))
                filled = count = 0
        if filled:
            parts.append((filled, count > 1))
        return parts


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
) -> tuple[int, ...]:
    """Gradients move into the bucket as they come; what they leave with each kind of ranks [bytes].

    Earlier micro-steps leave each rank's own gradients (``carries_owned``: stage 2), or
    ``carried_bytes`` of all, to which the new ones are added one by one and leave with them (stage
    1). ``peak`` takes the offers.
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
            held = settings.gradient_bytes(buffer.numels[moment.weight], moment.gradient_bytes)
            if not buckets or settings.casts:
                buckets = settings.buckets_bytes
                rank = reduction.kept.fullest_rank
                _offer_arrival(peak, moment, settings, reduction.gradients_bytes, held, rank)
            if carried_bytes:
                reduction.unreduced_bytes -= held
            reduction.add(moment.weight, held, peak, moment)
    reduction.reduce(0, peak, timeline.moments[-1])
    return reduction.left_bytes


def reduce_after_backward(
    timeline: BackwardTimeline,
    settings: ReductionSettings,
    buffer: FlatBuffer,
    ranks: RankKinds,
    *,
    carried: bool,
    gradient_sizes: list[int],
    peak: Peak,
) -> tuple[int, ...]:
    """Stage 1 without overlap: all gradients accumulate first; what they leave behind [bytes].

    ``carried``: they and the bucket are there from earlier micro-steps. ``gradient_sizes``: bytes of
    each parameter's gradient as it waits, 0 where it has none. ``peak`` takes the offers.
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
            held = gradient_sizes[moment.weight]
            if not buckets or settings.casts:
                buckets = settings.buckets_bytes
                _offer_arrival(peak, moment, settings, finished, held)
            if not carried:
                finished += held
    last = timeline.moments[-1]
    peak.offer(last.end_bytes, gradients=total, buckets=buckets, moment=last, at_end=True)
    reduction = Reduction(settings, buffer, ranks)
    _reduce_in_order(reduction, gradient_sizes, peak, last)
    return reduction.left_bytes


def _reduce_in_order(
    reduction: Reduction, gradient_sizes: list[int], peak: Peak, last: Moment
) -> None:
    """Every gradient through the bucket, in the order of the parameters."""
    reduction.unreduced_bytes = sum(gradient_sizes)
    for weight, size in enumerate(gradient_sizes):
        if size:
            reduction.unreduced_bytes -= size
            reduction.add(weight, size, peak, last)
    reduction.reduce(0, peak, last)


def _offer_arrival(
    peak: Peak,
    moment: Moment,
    settings: ReductionSettings,
    gradients_bytes: int,
    held_bytes: int,
    rank: int = 0,
) -> None:
    """A gradient is there: the first one has the buckets allocated; then it may be cast."""
    cast = held_bytes if settings.casts else 0
    peak.offer(
        moment.end_bytes,
        gradients=gradients_bytes + moment.gradient_bytes + moment.waiting_bytes + cast,
        buckets=settings.buckets_bytes,
        moment=moment,
        at_end=True,
        rank=rank,
    )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING
