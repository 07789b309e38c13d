"""Which ranks of DeepSpeed hold the same, and which may hold most."""

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
    """Ranks one of which holds most: no other outweighs them in all that sets ranks apart.

    Raises ``SetupError`` for engine options that DeepSpeed does not have.
    """
    job = prepare_job(given, rank=0)
    if not _ranks_differ(job):
        return [0]
    kinds = job.flat_buffer(round_robin=job.options.round_robin_gradients).every_rank.kinds
    arrivals = _arrivals(job)
    weighed = sorted((_weight_of(kind, arrivals), kind.rank) for kind in kinds)
    found: list[tuple[tuple[int, ...], int]] = []
    for own in weighed:
        if not any(all(a <= b for a, b in zip(other, own[0], strict=True)) for other, _ in found):
            found.append(own)
    return sorted(rank for _, rank in found)


def _weight_of(kind: RankKind, arrivals: dict[int, int]) -> tuple[int, ...]:
    """By what a rank can outweigh others: the less, the heavier.

    Elements of the whole gradients that it keeps, when the first of them comes, the largest piece,
    and whether there are more than one, which are then flattened.
    """
    first = min((arrivals.get(index, 0) for index, _ in kind.slices), default=len(arrivals))
    return (-kind.whole_numel, first, -kind.largest_slice, int(len(kind.slices) == 1))


def _arrivals(job: Job) -> dict[int, int]:
    """When each parameter's gradient is finished, by its number."""
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
