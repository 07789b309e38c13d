"""Which ranks of a pipeline hold the same, and which may hold most."""

from dataclasses import replace

from memplan.memory.programs.pipeline_plan import Crowd, followed
from memplan.memory.programs.pipeline_runtime import StageLink
from memplan.memory.rank import RankInput, Stage, joined
from memplan.training.precision import Engine
from memplan.training.schedules import most_in_flight, rank_passes, rank_stages


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
    if given.setup.chosen_engine is not Engine.FSDP:
        return [0] * width
    from memplan.memory.fsdp2.ranks import rank_kinds  # only then

    own = replace(given, tape=stage.tape, passes=stage.passes, stages=())
    table = [0] * width
    for number, runs in enumerate(rank_kinds(own)):
        for run in runs:
            table[run.start : run.stop] = [number] * len(run)
    return table


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
        flight = most_in_flight(
            rank_passes(
                pipeline.schedule,
                num_ranks=pipeline.degree,
                num_virtual=pipeline.num_virtual,
                num_micro_batches=pipeline.num_micro_batches,
                rank=place,
            )
        )
        counts = (*(count for _, count in flight.by_stage), flight.until_weight, flight.waiting)
        kind = tuple(id(given.stages[number].passes) for number in stages)
        alike.setdefault(kind, []).append((place, counts))
    places = [place for found in alike.values() for place in _of_kind(found, given)]
    return sorted(place * width for place in places)


FEW_PLACES = 2
"""Of one kind, as many as are weighed without a closer look."""


def _of_kind(found: list[tuple[int, tuple[int, ...]]], given: RankInput) -> list[int]:
    """Of places whose stages are alike, those one of which is the fullest."""
    places = _unsurpassed(found)
    if len(places) <= FEW_PLACES:
        return places
    crowds = {place: _crowd(given, place) for place in places}
    kept: list[int] = []
    for place in places:
        if any(crowds[other].outweighs(crowds[place]) for other in kept):
            continue
        kept = [other for other in kept if not crowds[place].outweighs(crowds[other])]
        kept.append(place)
    return kept


def _crowd(given: RankInput, place: int) -> Crowd:
    pipeline = given.setup.pipeline
    assert pipeline is not None
    where = {"num_ranks": pipeline.degree, "num_virtual": pipeline.num_virtual, "rank": place}
    numbers = rank_stages(pipeline.schedule, **where)
    passes = rank_passes(pipeline.schedule, num_micro_batches=pipeline.num_micro_batches, **where)
    stages = {number: given.stages[number] for number in numbers}
    links = {number: StageLink.of(stage.tape) for number, stage in stages.items()}
    return followed(passes, (), stages, pipeline, links).crowd


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
