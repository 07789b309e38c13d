"""Which ranks hold the same under FSDP2."""

from memplan.errors import SetupError
from memplan.memory.fsdp2.options import Fsdp2Options
from memplan.memory.fsdp2.units import UnitFormats, find_units, places_alike
from memplan.memory.rank import RankInput, in_every_replica


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together whose chunks are equally large."""
    options = Fsdp2Options.of(given.setup)
    formats = UnitFormats.of(given, options, offloaded=False)
    runs = places_alike(find_units(given.tape, options, formats), formats.degree)
    num_ranks = given.setup.data_parallel
    return [in_every_replica(run, degree=formats.degree, num_ranks=num_ranks) for run in runs]


def check_degrees(given: RankInput) -> None:
    """Refuse parallelism that the engine's account does not hold.

    Raises ``SetupError``.
    """
    setup = given.setup
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(setup, name) > 1:
            msg = f"{name}: not modelled with {setup.chosen_engine.value} yet; leave it at 1"
            raise SetupError(msg)
