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
        runs = [kind.ranks for kind in buffer.every_rank.kinds]
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
    """Ranks one of which holds most.

    What another outweighs in all that sets ranks apart is left out: elements of the whole gradients that
    it keeps, the largest piece, whether there are more than one, which are then flattened, and for every
    piece one that comes no later and is no smaller.

    Raises ``SetupError`` for engine options that DeepSpeed does not have.
    """
    job = prepare_job(given, rank=0)
    if not _ranks_differ(job):
        return [0]
    kinds = job.flat_buffer(round_robin=job.options.round_robin_gradients).every_rank.kinds
    if _others_gradients_stay(job):
        return [kind.rank for kind in kinds]
    arrivals = _arrivals(job)
    weighed = sorted((_Weight.of(kind, arrivals) for kind in kinds), key=lambda each: each.scale)
    found: list[_Weight] = []
    for own in weighed:
        if not any(other.outweighs(own) for other in found):
            found.append(own)
    return sorted(each.rank for each in found)


def _others_gradients_stay(job: Job) -> bool:
    """Whether a rank may keep gradients that it does not own: in stage 1 those larger than the bucket,
    and those that are cast; in stage 2 only where they accumulate in another dtype."""
    if job.accumulates_apart:
        return True
    is_first = job.given.setup.zero_stage is ZeroStage.OPTIMIZER
    return is_first and job.weights.largest_trained > job.options.reduce_bucket_size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """By what a rank can outweigh others."""

    rank: int
    scale: tuple[int, ...]
    """The less, the heavier."""
    pieces: list[tuple[int, int]]
    """Of its own: when the gradient comes, and elements."""

    @classmethod
    def of(cls, kind: RankKind, arrivals: dict[int, int]) -> "_Weight":
        """A kind of ranks, by its first."""
        pieces = sorted((arrivals.get(index, 0), numel) for index, numel in kind.slices)
        first = pieces[0][0] if pieces else len(arrivals)
        return cls(
            rank=kind.rank,
            scale=(-kind.whole_numel, first, -kind.largest_slice, int(len(pieces) == 1)),
            pieces=pieces,
        )

    def outweighs(self, other: "_Weight") -> bool:
        """Whether the other cannot hold more at any time."""
        return all(a <= b for a, b in zip(self.scale, other.scale, strict=True)) and all(
            any(time <= late and numel >= small for time, numel in self.pieces)
            for late, small in other.pieces
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
