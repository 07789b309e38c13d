"""Which ranks of DeepSpeed hold the same, and which may hold most."""

from memplan.fast_dataclass import dataclass
from memplan.memory.deepspeed.job import Job, prepare_job
from memplan.memory.deepspeed.partition import RankKind
from memplan.memory.rank import RankInput
from memplan.training.setup import ZeroStage


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together that hold the same; the first, which saves for all, by itself."""
    job = prepare_job(given, rank=0)
    runs = [range(job.num_ranks)]
    if _ranks_differ(job):
        buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
        runs = [kind.ranks for kind in buffer.every_rank]
    return [(run,) for run in (range(1), range(1, runs[0].stop), *runs[1:]) if run]


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
    kinds = job.flat_buffer(round_robin=job.options.round_robin_gradients).every_rank
    if job.accumulates_apart:
        # Buckets that another rank's cast gradients are views of stay; which, no weight here says.
        return [kind.rank for kind in kinds]
    arrivals = _arrivals(job)
    weighed = [_Weight.of(kind, job, arrivals) for kind in kinds]
    found: list[_Weight] = []
    for own in sorted(weighed, key=lambda each: each.scale):
        if not any(other.outweighs(own) for other in found):
            found.append(own)
    return sorted(each.rank for each in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """By what a rank can outweigh others."""

    rank: int
    scale: tuple[int, ...]
    """The less, the heavier: elements of the whole gradients that it keeps, when the first of them is
    reduced, its largest piece, and whether there are more than one, which are then flattened."""
    measured: list[tuple[int, int]]
    """With the optimizer on the CPU, pieces whose norms are taken: when, and elements."""
    let_go: frozenset[int]
    """Stage 1: gradients larger than the bucket stay, but for those that are its own."""

    @classmethod
    def of(cls, kind: RankKind, job: Job, arrivals: dict[int, int]) -> "_Weight":
        """A kind of ranks, by its first."""
        pieces = sorted((arrivals.get(index, 0), numel) for index, numel in kind.slices)
        first = pieces[0][0] if pieces else len(arrivals)
        limit = job.options.reduce_bucket_size
        keeps_others = job.given.setup.zero_stage is ZeroStage.OPTIMIZER
        return cls(
            rank=kind.rank,
            scale=(-kind.whole_numel, first, -kind.largest_slice, int(len(pieces) == 1)),
            measured=pieces if job.offloads_optimizer else [],
            let_go=frozenset(
                index
                for index, _ in kind.slices
                if keeps_others and job.weights.numels[index] > limit
            ),
        )

    def outweighs(self, other: "_Weight") -> bool:
        """Whether the other cannot hold more at any time."""
        if not self.let_go <= other.let_go:
            return False
        return all(a <= b for a, b in zip(self.scale, other.scale, strict=True)) and all(
            any(time <= late and numel >= small for time, numel in self.measured)
            for late, small in other.measured
        )


def _arrivals(job: Job) -> dict[int, int]:
    """When each parameter's gradient is reduced, by its number: when it comes, or afterwards in the
    order of the buffer."""
    if job.given.setup.zero_stage is ZeroStage.OPTIMIZER and not job.options.overlap_comm:
        buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
        return {index: position for position, index in enumerate(buffer.order)}
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
    return found
