"""A model wrapped in ``FullyShardedDataParallel``, and which of its ranks hold the same."""

from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import frozen_format
from memplan.memory.fsdp1.options import Fsdp1Options
from memplan.memory.fsdp1.units import find_flat_units, heaviest_states, own_states
from memplan.memory.fsdp2.units import UnitFormats, Units
from memplan.memory.rank import RankInput, in_every_replica
from memplan.training.choices import FsdpStrategy, Offload


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedModel:
    """The model as it is wrapped."""

    options: Fsdp1Options
    formats: UnitFormats
    units: Units
    keeps_whole: bool
    """Parameters stay gathered from forward to backward (SHARD_GRAD_OP)."""


def wrap(given: RankInput) -> WrappedModel:
    """Read the options, and sort the parameters into flat ones.

    Raises ``SetupError`` for options that do not exist or cannot be.
    """
    options = Fsdp1Options.of(given.setup)
    keeps_whole = given.setup.fsdp_strategy is FsdpStrategy.SHARD_GRAD_OP
    formats = UnitFormats(
        degree=options.shard_degree(given.setup),
        kept=given.formats.weights,
        frozen=frozen_format(given.setup),
        compute=given.formats.compute,
        reduce=options.reduce_dtype or given.formats.compute,
        states=given.formats.optimizer_states,
        offloaded=given.setup.offload_param is Offload.CPU,
    )
    units = find_flat_units(given.tape, options, formats, keeps_whole=keeps_whole)
    return WrappedModel(options=options, formats=formats, units=units, keeps_whole=keeps_whole)


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together whose optimizers keep the same."""
    wrapped = wrap(given)
    degree, num_ranks = wrapped.formats.degree, given.setup.gradient_ranks
    return [
        in_every_replica(own.places, degree=degree, num_ranks=num_ranks)
        for own in own_states(wrapped.units, wrapped.formats)
    ]


def heaviest_ranks(given: RankInput) -> list[int]:
    """Ranks one of which holds most: with original parameters that is one whose part has the most
    bytes, or the most pieces, each rounded up for itself.

    Raises ``SetupError`` for options that do not exist or cannot be.
    """
    wrapped = wrap(given)
    kinds = own_states(wrapped.units, wrapped.formats)
    return [kind.places.start for kind in heaviest_states(kinds)]
