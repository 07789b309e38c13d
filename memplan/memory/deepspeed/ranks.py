"""Which ranks of DeepSpeed hold the same, and which may hold most."""

from memplan.fast_dataclass import dataclass
from memplan.memory.deepspeed.job import Job, prepare_job, rounded
from memplan.memory.deepspeed.partition import FlatBuffer, RankKind
from memplan.memory.deepspeed.reduction import NORM_BYTES
from memplan.memory.rank import RankInput
from memplan.training.choices import ZeroStage


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together that hold the same; the first, which saves for all, by itself."""
    job = prepare_job(given, rank=0)
    others = range(1, job.num_ranks)
    if not _ranks_differ(job):
        return [(range(1),), *([(others,)] if others else [])]
    buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
    buckets = _buckets(job, buffer, _arrivals(job))
    alike: dict[object, list[range]] = {}
    for kind in buffer.every_rank:
        own = _on_host(kind, buckets, job) if _measures_alone(job) else _on_gpu(kind, buckets)
        for run in (range(1), range(max(1, kind.ranks.start), kind.ranks.stop)):
            if run and run.start in kind.ranks:
                alike.setdefault((not run.start, own), []).append(run)
    return [tuple(runs) for runs in alike.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """Gradients that are reduced together."""

    number: int
    ranks: range
    """From which one's part to which one's they go."""
    is_large: bool
    """There is one alone, which is larger than a bucket."""
    copied_bytes: int
    """What the largest flat copy takes through which they are summed."""


_NONE = _Bucket(number=-1, ranks=range(0), is_large=False, copied_bytes=0)
"""Of what has no gradient."""


def _on_gpu(kind: RankKind, buckets: dict[int, _Bucket]) -> object:
    """All that tells a rank's steps apart: what of its part is reduced when, and which buckets are its
    own from end to end."""
    slices = []
    for index, numel in kind.slices:
        bucket = buckets.get(index, _NONE)
        alone = len(kind.ranks) == len(bucket.ranks) == 1 and kind.ranks == bucket.ranks
        slices.append((bucket.number, numel, alone))
    return kind.whole_numel, tuple(slices)


def _measures_alone(job: Job) -> bool:
    """Whether a rank keeps nothing of its gradients on the GPU, and only measures what goes to the CPU."""
    return job.offloads_optimizer and not job.accumulates_apart


def _on_host(kind: RankKind, buckets: dict[int, _Bucket], job: Job) -> object:
    """The same where gradients go to the CPU: norms that take more than the copies that their bucket was summed
    through a moment before, large gradients that stage 1 lets go sooner, and what is kept in CPU RAM."""
    stage1 = job.given.setup.zero_stage is ZeroStage.OPTIMIZER
    norms: dict[_Bucket, int] = {}
    for index, numel in kind.slices:
        bucket = buckets.get(index, _NONE)
        norms[bucket] = max(rounded(NORM_BYTES * numel), norms.get(bucket, 0))
    seen = frozenset(
        (each.number, max(0, size - each.copied_bytes))
        for each, size in norms.items()
        if size > each.copied_bytes or (stage1 and each.is_large)
    )
    return seen, kind.whole_numel if job.accumulates else 0


def _buckets(job: Job, buffer: FlatBuffer, arrivals: dict[int, int]) -> dict[int, _Bucket]:
    """With which bucket each parameter's gradient is reduced, by its number."""
    limit = job.options.reduce_bucket_size
    found: list[list[int]] = []
    filled = limit
    for index in sorted(arrivals, key=arrivals.__getitem__):
        numel = buffer.numels[index]
        if filled + numel > limit or not found:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += numel
    buckets = [_bucket(number, each, job, buffer) for number, each in enumerate(found)]
    return {index: buckets[number] for number, each in enumerate(found) for index in each}


def _bucket(number: int, members: list[int], job: Job, buffer: FlatBuffer) -> _Bucket:
    ranks = _ranks_of(members, buffer)
    limit = job.options.reduce_bucket_size
    numel = sum(buffer.numels[index] for index in members)
    pieces = buffer.sums(members[0], limit) if numel > limit else [(numel, len(ranks) > 1)]
    copied = max((size for size, is_copied in pieces if is_copied), default=0)
    return _Bucket(
        number=number,
        ranks=ranks,
        is_large=numel > limit,
        copied_bytes=rounded(job.weight_bytes * copied) if job.options.reduce_scatter else 0,
    )


def _ranks_of(bucket: list[int], buffer: FlatBuffer) -> range:
    first = min(buffer.first_rank[index] for index in bucket)
    return range(first, 1 + max(buffer.last_rank[index] for index in bucket))


def _ranks_differ(job: Job) -> bool:
    """Whether a rank keeps whole gradients of what touches its part of one flat buffer.

    Stages 0 and 3 and ``BF16_Optimizer`` give every GPU the same.
    """
    stage = job.given.setup.zero_stage
    if stage not in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS) or job.num_ranks == 1:
        return False
    return stage is ZeroStage.GRADIENTS or not job.uses_bf16_optimizer


def heaviest_ranks(given: RankInput) -> list[int]:
    """Ranks one of which holds most: what another outweighs in all that sets ranks apart is left out.

    Raises ``SetupError`` for engine options that DeepSpeed does not have.
    """
    job = prepare_job(given, rank=0)
    if not _ranks_differ(job):
        return [0]
    buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
    kinds = buffer.every_rank
    if job.accumulates_apart:
        # Buckets that another rank's cast gradients are views of stay; which, no weight here says.
        return [kind.rank for kind in kinds]
    arrivals = _arrivals(job)
    buckets = _buckets(job, buffer, arrivals) if job.offloads_optimizer else {}
    weighed = [_Weight.of(kind, job, arrivals, buckets) for kind in kinds]
    found: list[_Weight] = []
    for own in sorted(weighed, key=lambda each: (each.at_step, each.rank)):
        if not any(other.outweighs(own) for other in found):
            found = [each for each in found if not own.outweighs(each)] + [own]
    return sorted(each.rank for each in found)


Place = tuple[int, int]
"""A parameter of a layer: the number of its segment, and its position there."""
ANYWHERE: Place = (-1, -1)
Step = tuple[int, int]
"""From when on, and how much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """By what a rank can outweigh others. What all hold falls from reduction to reduction."""

    rank: int
    at_step: tuple[int, ...]
    """When the optimizer steps, the less, the heavier: elements that it keeps more than others do, its
    largest piece, and whether there are more than one, which are then flattened. Where none keeps anything, the
    first, which saves for all, stands for those that are as full."""
    kept: list[Step]
    """Elements that it keeps more than others do, while gradients are reduced."""
    measured: list[tuple[Place, int, int]]
    """With the optimizer on the CPU, pieces whose norms are taken: of what, when, and bytes."""
    let_go: frozenset[int]
    """Where gradients are reduced while others come, those that others keep and it does not."""

    @classmethod
    def of(
        cls, kind: RankKind, job: Job, arrivals: dict[int, int], buckets: dict[int, _Bucket]
    ) -> "_Weight":
        """A kind of ranks, by its first."""
        pieces = sorted((arrivals.get(index, 0), numel) for index, numel in kind.slices)
        large = _own_that_others_keep(kind, job)
        overlaps = job.options.overlap_comm
        # What goes to the CPU at once, and stays there in no rank's own size, is the same for all.
        keeps = job.accumulates or not job.offloads_optimizer
        whole = kind.whole_numel if keeps else 0
        kept = _kept(kind, job, arrivals, whole, besides=frozenset() if overlaps else large)
        step = (-kept[-1][1], -kind.largest_slice, int(len(pieces) == 1))
        return cls(
            rank=kind.rank,
            at_step=step if keeps else (step[0], int(kind.rank > 0)),
            kept=kept,
            measured=_measured(kind, job, arrivals, buckets) if buckets else [],
            let_go=large if overlaps else frozenset(),
        )

    def outweighs(self, other: "_Weight") -> bool:
        """Whether the other cannot hold more at any time: whatever it keeps, this one kept no less and
        no later."""
        return (
            all(a <= b for a, b in zip(self.at_step, other.at_step, strict=True))
            and _covers(self.kept, other.kept)
            and self._measures_no_less(other)
            and self.let_go <= other.let_go
        )

    def _measures_no_less(self, other: "_Weight") -> bool:
        """What is larger than the bucket, at the same place of a layer behind: the model holds no less there."""
        return all(
            any(key == place and time <= late and size >= less for key, time, size in self.measured)
            for place, late, less in other.measured
        )


def _covers(steps: list[Step], others: list[Step]) -> bool:
    return all(any(time <= late and size >= less for time, size in steps) for late, less in others)


def _measured(
    kind: RankKind, job: Job, arrivals: dict[int, int], buckets: dict[int, _Bucket]
) -> list[tuple[Place, int, int]]:
    """A piece's norm is taken while its gradient, if larger than the bucket, is still there; one that takes less than
    the copy that the bucket was summed through a moment before makes nobody fuller."""
    numels, limit = job.weights.numels, job.options.reduce_bucket_size
    found: list[tuple[Place, int, int]] = []
    for index, numel in kind.slices:
        time, size = arrivals.get(index, 0), NORM_BYTES * numel
        if size <= buckets.get(index, _NONE).copied_bytes:
            continue
        if numels[index] > limit:
            whole = job.weight_bytes * numels[index]
            found.append((job.weights.place(index), time, size + whole))
        else:
            found.append((ANYWHERE, time, size))
    return found


def _own_that_others_keep(kind: RankKind, job: Job) -> frozenset[int]:
    """Stage 1: gradients larger than the bucket stay with all ranks but those that own some of them."""
    if job.given.setup.zero_stage is not ZeroStage.OPTIMIZER:
        return frozenset()
    numels, limit = job.weights.numels, job.options.reduce_bucket_size
    return frozenset(index for index, _ in kind.slices if numels[index] > limit)


def _kept(
    kind: RankKind, job: Job, arrivals: dict[int, int], more: int, *, besides: frozenset[int]
) -> list[Step]:
    """Its own gradients lie whole in one buffer from the first on, which is no ``more`` than what others
    keep of some."""
    kept: list[Step] = [(0, 0)]
    for time, index in sorted((arrivals.get(index, 0), index) for index, _ in kind.slices):
        more -= job.weights.numels[index] if index in besides else 0
        kept.append((time, more))
    return kept


def _arrivals(job: Job) -> dict[int, int]:
    """When each parameter's gradient is reduced, by its number: when it comes, or afterwards in the
    order of the buffer."""
    found: dict[int, int] = {}
    remaining = {segment.index: segment.repeat for segment in job.given.tape.segments}
    for each in job.given.passes.backward:
        index = each.segment.index
        for _ in range(each.repeats):
            remaining[index] -= 1
            for interval in each.intervals:
                parameter = interval.parameter
                if parameter is not None:
                    own = parameter in each.segment.parameters
                    number = job.weights.number(parameter, remaining[index] if own else 0)
                    found[number] = len(found)
    if job.given.setup.zero_stage is ZeroStage.OPTIMIZER and not job.options.overlap_comm:
        buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
        return {index: place for place, index in enumerate(buffer.order) if index in found}
    return found
