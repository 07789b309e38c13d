"""Which ranks of a pipeline hold the same, and which may hold most."""

from memplan.memory.rank import RankInput
from memplan.training.schedules import most_in_flight, rank_passes, rank_stages


def pipeline_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """The ranks of each place in the pipeline."""
    pipeline = given.setup.pipeline
    assert pipeline is not None
    width = given.setup.num_gpus // pipeline.degree
    return [(range(place * width, (place + 1) * width),) for place in range(pipeline.degree)]


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
    return sorted(place * width for found in alike.values() for place in _unsurpassed(found))


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
