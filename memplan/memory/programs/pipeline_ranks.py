"""Which ranks of a pipeline hold the same, and which may hold most."""

from functools import lru_cache

from memplan.fast_dataclass import replace
from memplan.memory.crowds import Sizes
from memplan.memory.programs.pipeline_plan import level_of, sizes_of
from memplan.memory.rank import RankInput, Stage, joined
from memplan.training.precision import Engine
from memplan.training.splitting.parallelism import PipelineParallel
from memplan.training.splitting.schedules import most_in_flight, passes_of, rank_stages


def pipeline_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """The ranks of each place in the pipeline, those together whose shards are equally large."""
    pipeline = given.setup.pipeline
    assert pipeline is not None
    width = given.setup.num_gpus // pipeline.degree
    found: list[tuple[range, ...]] = []
    for place in range(pipeline.degree):
        numbers = rank_stages(
            pipeline.schedule,
            num_ranks=pipeline.degree,
            num_virtual=pipeline.num_virtual,
            rank=place,
        )
        first = place * width
        found += [
            tuple(range(first + run.start, first + run.stop) for run in runs)
            for runs in _alike([given.stages[number] for number in numbers], given, width)
        ]
    return found


def _alike(stages: list[Stage], given: RankInput, width: int) -> list[tuple[range, ...]]:
    """Of the ranks of a place those together that hold the same of every one of its stages."""
    kinds: dict[tuple[int, ...], list[range]] = {}
    tables = [_kinds_of(stage, given, width) for stage in stages]
    for rank in range(width):
        kinds.setdefault(tuple(table[rank] for table in tables), []).append(range(rank, rank + 1))
    return [joined(runs) for runs in kinds.values()]


def _kinds_of(stage: Stage, given: RankInput, width: int) -> list[int]:
    """For each rank of a place, the number of its kind."""
    if given.setup.chosen_engine not in (Engine.FSDP, Engine.DEEPSPEED):
        return [0] * width
    from memplan.memory.programs import rank_kinds

    own = replace(given, tape=stage.tape, passes=stage.passes, stages=())
    table = [0] * width
    for number, runs in enumerate(rank_kinds(own)):
        for run in runs:
            table[run.start : run.stop] = [number] * len(run)
    return table


def sizes_of_rank(given: RankInput, rank: int) -> Sizes:
    """What a batch makes of what is beside a rank's passes."""
    return sizes_of(given, place_of(given, rank))


def heaviest_places(given: RankInput) -> list[int]:
    """A rank of each place in the pipeline that no other one surely outweighs.

    Of places whose stages are alike, those with no fewer micro-batches of any stage in flight.
    """
    pipeline = given.setup.pipeline
    assert pipeline is not None
    width = given.setup.num_gpus // pipeline.degree
    alike: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for place in range(pipeline.degree):
        stages = rank_stages(
            pipeline.schedule,
            num_ranks=pipeline.degree,
            num_virtual=pipeline.num_virtual,
            rank=place,
        )
        counts = _counts(pipeline, place)
        kind = tuple(id(given.stages[number].passes) for number in stages)
        alike.setdefault(kind, []).append((place, counts))
    places = [place for found in alike.values() for place in _of_kind(found, given)]
    return sorted(place * width + rank for place in places for rank in _heaviest(given, place))


def _heaviest(given: RankInput, place: int) -> list[int]:
    """Of a place's ranks those one of which holds most: DeepSpeed's differ by what they keep."""
    if given.setup.chosen_engine is not Engine.DEEPSPEED:
        return [0]
    from memplan.memory.programs import heaviest_ranks

    stage = given.stages[place]
    return heaviest_ranks(replace(given, tape=stage.tape, passes=stage.passes, stages=()))


@lru_cache(maxsize=1024)
def _counts(pipeline: PipelineParallel, place: int) -> tuple[int, ...]:
    """The most that a place holds in flight: of each of its stages, of all, and with a pass to come."""
    flight = most_in_flight(passes_of(pipeline, place))
    return (*(count for _, count in flight.by_stage), flight.until_weight, flight.waiting)


FEW_PLACES = 2
"""Of one kind, as many as are weighed without a closer look."""


def _of_kind(found: list[tuple[int, tuple[int, ...]]], given: RankInput) -> list[int]:
    """Of places whose stages are alike, those one of which is the fullest."""
    places = _unsurpassed(found)
    if len(places) <= FEW_PLACES:
        return places
    levels = {place: level_of(given, place) for place in places}
    kept: list[int] = []
    for place in places:
        if any(levels[other].outweighs(levels[place]) for other in kept):
            continue
        kept = [other for other in kept if not levels[place].outweighs(levels[other])]
        kept.append(place)
    return kept


def _unsurpassed(found: list[tuple[int, tuple[int, ...]]]) -> list[int]:
    kept: list[tuple[int, tuple[int, ...]]] = []
    for place, counts in found:
        if any(_covers(other, counts) for _, other in kept):
            continue
        kept = [each for each in kept if not _covers(counts, each[1])]
        kept.append((place, counts))
    return [place for place, _ in kept]


def _covers(counts: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(one >= other for one, other in zip(counts, others, strict=True))


def place_of(given: RankInput, rank: int) -> int:
    """Where in the pipeline a rank stands: the pipeline is the outermost dimension of the mesh.

    (torchtitan, Megatron-core and DeepSpeed alike)
    """
    setup = given.setup
    return rank // (setup.num_gpus // setup.pipeline_parallel)
