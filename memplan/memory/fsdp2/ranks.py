"""Which ranks hold the same under FSDP2."""

from memplan.memory.fsdp2.options import Fsdp2Options
from memplan.memory.fsdp2.units import UnitFormats, find_units, places_alike
from memplan.memory.rank import RankInput, in_every_replica


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together whose chunks are equally large."""
    options = Fsdp2Options.of(given.setup)
    formats = UnitFormats.of(given, options, offloaded=False)
    runs = places_alike(find_units(given.tape, options, formats), formats.degree)
    num_ranks = given.setup.gradient_ranks
    kinds = [in_every_replica(run, degree=formats.degree, num_ranks=num_ranks) for run in runs]
    # Ranks that split the layers between them stand side by side.
    split = given.setup.tensor_parallel
    return [tuple(range(run.start * split, run.stop * split) for run in kind) for kind in kinds]
