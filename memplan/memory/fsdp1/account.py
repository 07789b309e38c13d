"""The account of one rank under FSDP1."""

from memplan.fast_dataclass import dataclass
from memplan.graph.tape import Tape
from memplan.memory.account import ComponentKind, Entry, Phase, RankAccount, make_phase
from memplan.memory.fsdp1.options import AutoWrap, Fsdp1Options
from memplan.memory.fsdp1.replay import FlatMicroBatch
from memplan.memory.fsdp1.units import find_flat_units, heaviest_states, own_states
from memplan.memory.fsdp2.account import (
    check_degrees,
    fuller,
    host_memory,
    micro_batches,
    optimizer_copies_entry,
    state_entries,
    total_of,
)
from memplan.memory.fsdp2.options import InitDevice, StateDictType
from memplan.memory.fsdp2.units import ROOT, OwnStates, UnitFormats, Units
from memplan.memory.moments import Moments
from memplan.memory.rank import RankInput, in_every_replica
from memplan.memory.states import buffer_entry
from memplan.training.setup import FsdpStrategy, Offload


def fsdp1_account(given: RankInput, *, rank: int | None = None) -> RankAccount:
    """The account of a rank whose model is wrapped in ``FullyShardedDataParallel``.

    ``rank`` None: one that holds most. With original parameters that is the one
    whose part has the most pieces, each rounded up for itself.

    Raises ``SetupError`` for options that do not exist or cannot be.
    """
    wrapped = wrap(given)
    options, formats, units = wrapped.options, wrapped.formats, wrapped.units
    offloaded = formats.offloaded
    forward, backward = _passes(given, wrapped)
    gradients = _gradient_entry(units, offloaded=offloaded)
    stays = gradients.num_bytes if options.use_orig_params else 0
    begins = [gradients] if stays > forward.best_bytes else forward.entries()

    def steps(own: OwnStates) -> tuple[Phase, ...]:
        states = state_entries(given, units, own, offloaded=offloaded)
        copies = optimizer_copies_entry(given, own, offloaded=offloaded)
        return (
            make_phase("forward", [*states, *begins]),
            make_phase("backward", [*states, *backward.entries()]),
            make_phase("step", [*states, gradients, *copies]),
        )

    kinds = own_states(units, formats)
    if rank is None:
        heaviest = heaviest_states(kinds)
        own = max(heaviest, key=lambda kind: max(phase.peak_bytes for phase in steps(kind)))
        rank = own.places.start
    else:
        place = rank % formats.degree
        own = next(kind for kind in kinds if place in kind.places)
    states = state_entries(given, units, own, offloaded=offloaded)
    phases = (
        make_phase("load", _load_entries(given.tape, options, units, offloaded=offloaded)),
        *steps(own),
        _save_phase(options, units, [*states]),
    )
    return RankAccount(
        rank=rank,
        phases=phases,
        held_bytes=sum(entry.num_bytes for entry in states) + stays,
        host=host_memory(
            given,
            units,
            own,
            offloaded=offloaded,
            init_device=options.init_device,
            state_dict_type=options.state_dict_type,
            pinned=True,
        ),
    )


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together whose optimizers keep the same."""
    wrapped = wrap(given)
    degree, num_ranks = wrapped.formats.degree, given.setup.data_parallel
    return [
        in_every_replica(own.places, degree=degree, num_ranks=num_ranks)
        for own in own_states(wrapped.units, wrapped.formats)
    ]


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
    check_degrees(given)
    keeps_whole = given.setup.fsdp_strategy is FsdpStrategy.SHARD_GRAD_OP
    formats = UnitFormats(
        degree=options.shard_degree(given.setup),
        kept=given.formats.weights,
        compute=given.formats.compute,
        reduce=options.reduce_dtype or given.formats.compute,
        states=given.formats.optimizer_states,
        offloaded=given.setup.offload_param is Offload.CPU,
    )
    units = find_flat_units(given.tape, options, formats, keeps_whole=keeps_whole)
    return WrappedModel(options=options, formats=formats, units=units, keeps_whole=keeps_whole)


def _passes(given: RankInput, wrapped: WrappedModel) -> tuple[Moments, Moments]:
    options, units = wrapped.options, wrapped.units
    replays = []
    for gradients in micro_batches(given, sync_each_batch=options.sync_each_batch):
        replay = FlatMicroBatch(
            units,
            wrapped.formats,
            given.passes,
            gradients=gradients,
            backward_prefetch=options.backward_prefetch,
            forward_prefetch=options.forward_prefetch,
            keeps_whole=wrapped.keeps_whole,
        )
        replay.run()
        replays.append(replay)
    return fuller(replays)


def _gradient_entry(units: Units, *, offloaded: bool) -> Entry:
    size = 0 if offloaded else total_of(units, "gradient_shard_bytes")
    return Entry(ComponentKind.GRADIENTS, size, "of the rank's shards")


def _load_entries(
    tape: Tape, options: Fsdp1Options, units: Units, *, offloaded: bool
) -> list[Entry]:
    """The GPU while the model is wrapped, unit by unit, the root last."""
    shards, whole = _load_peak(units, on_gpu=options.init_device is InitDevice.CUDA)
    if offloaded:
        shards = 0
    return [
        Entry(ComponentKind.PARAMETERS, shards, "flat shards"),
        buffer_entry(tape),
        Entry(ComponentKind.GATHERED_PARAMETERS, whole, "the parameters being joined and sharded"),
    ]


def _load_peak(units: Units, *, on_gpu: bool) -> tuple[int, int]:
    """Shards and whole parameters at the fullest moment of wrapping [bytes].

    A unit's parameters, the flat one they are joined into and its shard are there at once
    (``_flat_param.py``: ``_init_flat_param_and_metadata``, ``shard``).
    """
    left = total_of(units, "whole_bytes") if on_gpu else 0
    best, done = (0, left), 0
    for unit in [*units.layers.values(), *units.single()]:
        for _ in range(unit.num_copies):
            done += unit.shard_bytes
            whole = (left if on_gpu else unit.whole_bytes) + unit.whole_bytes
            best = max(best, (done, whole), key=sum)
            left -= unit.whole_bytes
    return best


def _save_phase(options: Fsdp1Options, units: Units, held: list[Entry]) -> Phase:
    """A full checkpoint gathers the root for as long as it goes through the layers."""
    whole = 0
    if options.state_dict_type is StateDictType.FULL:
        whole = units.root.whole_bytes
        if options.wrapping is AutoWrap.LAYERS:
            layers = (unit.whole_bytes for unit in units.all() if unit.name != ROOT)
            whole += max(layers, default=0)
    gathered = Entry(ComponentKind.GATHERED_PARAMETERS, whole, "whole units of a full checkpoint")
    return make_phase("save", [*held, gathered])
