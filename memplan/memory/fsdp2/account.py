"""The account of one rank under FSDP2."""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.graph.tensors import allocated_bytes
from memplan.memory.account import ComponentKind, Entry, HostMemory, Phase, RankAccount, make_phase
from memplan.memory.fsdp2.options import Fsdp2Options, InitDevice, StateDictType
from memplan.memory.fsdp2.replay import Gradients, MicroBatch
from memplan.memory.fsdp2.units import (
    OwnStates,
    UnitFormats,
    Units,
    find_units,
    own_states,
    places_alike,
)
from memplan.memory.host import pinned_bytes
from memplan.memory.moments import Moments
from memplan.memory.rank import RankInput, in_every_replica
from memplan.memory.states import buffer_entry
from memplan.training.optimizers import OPTIMIZERS
from memplan.training.setup import Offload
from memplan.units import ceil_div


def fsdp2_account(given: RankInput, *, rank: int = 0) -> RankAccount:
    """The account of a rank whose model is sharded with ``fully_shard``.

    No rank holds more than the first: ``torch.chunk`` makes the first chunks the largest.

    Raises ``SetupError`` for options that do not exist or cannot be.
    """
    options = Fsdp2Options.of(given.setup)
    check_degrees(given)
    offloaded = given.setup.offload_param is Offload.CPU
    formats = UnitFormats.of(given, options, offloaded=offloaded)
    units = find_units(given.tape, options, formats)
    place = rank % formats.degree
    own = own_states(units, formats, range(place, place + 1))
    states = state_entries(given, units, own, offloaded=offloaded)
    forward, backward = _passes(given, options, units, formats)
    gradients = Entry(
        ComponentKind.GRADIENTS,
        0 if offloaded else total_of(units, "gradient_shard_bytes"),
        "of the rank's shards",
    )
    copies = optimizer_copies_entry(given, own, offloaded=offloaded)
    phases = (
        make_phase("load", load_entries(given, options, units, offloaded=offloaded)),
        make_phase("forward", [*states, *forward.entries()]),
        make_phase("backward", [*states, *backward.entries()]),
        make_phase("step", [*states, gradients, *copies]),
        _save_phase(options, units, [*states], gathers=formats.degree > 1),
    )
    return RankAccount(
        rank=rank,
        phases=phases,
        held_bytes=sum(entry.num_bytes for entry in states),
        host=host_memory(
            given,
            units,
            own,
            offloaded=offloaded,
            init_device=options.init_device,
            state_dict_type=options.state_dict_type,
            pinned=options.pin_memory,
        ),
    )


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


def _passes(
    given: RankInput, options: Fsdp2Options, units: Units, formats: UnitFormats
) -> tuple[Moments, Moments]:
    """Replay every kind of micro-batch."""
    replays = []
    for gradients in micro_batches(given, sync_each_batch=options.sync_each_batch):
        replay = MicroBatch(
            units,
            formats,
            given.passes,
            gradients=gradients,
            replicated=options.data_parallel_replicate_degree > 1,
            max_reduce_inputs=options.reduce_scatter_max_input_buffers,
        )
        replay.run()
        replays.append(replay)
    return fuller(replays)


def fuller(replays: Sequence[MicroBatch]) -> tuple[Moments, Moments]:
    """The fullest moments of forward and backward over all kinds of micro-batch."""
    return (
        max((each.forward_moments for each in replays), key=lambda found: found.best_bytes),
        max((each.backward_moments for each in replays), key=lambda found: found.best_bytes),
    )


def micro_batches(given: RankInput, *, sync_each_batch: bool) -> list[Gradients]:
    """Every kind of micro-batch of one step."""
    steps = given.setup.gradient_accumulation_steps
    if steps == 1:
        return [Gradients.NONE_REDUCED]
    if sync_each_batch:
        return [Gradients.NONE_REDUCED, Gradients.SHARDS_REDUCED]
    kinds = [Gradients.NONE_KEPT, Gradients.WHOLE_REDUCED]
    if steps > 2:
        kinds.append(Gradients.WHOLE_KEPT)
    return kinds


def state_entries(
    given: RankInput, units: Units, own: OwnStates, *, offloaded: bool
) -> list[Entry]:
    """What a rank's GPU holds between steps."""
    entries = [
        buffer_entry(given.tape),
        Entry(ComponentKind.INPUTS, given.tape.inputs_bytes, "token ids and labels"),
    ]
    if offloaded:
        return entries
    formats = given.formats
    optimizer = OPTIMIZERS[given.setup.optimizer]
    return [
        Entry(ComponentKind.PARAMETERS, shard_bytes(units), f"{formats.weights.label} shards"),
        Entry(
            ComponentKind.OPTIMIZER_STATES,
            optimizer_bytes(given, own),
            f"{optimizer.num_states} x {formats.optimizer_states.label} of the shards",
        ),
        *entries,
    ]


def shard_bytes(units: Units) -> int:
    """All of a rank's shards [bytes]."""
    return total_of(units, "shard_bytes")


def total_of(units: Units, name: str) -> int:
    """A size added up over all units of a rank [bytes]."""
    return sum(int(getattr(unit, name)) * unit.num_copies for unit in units.all())


def optimizer_bytes(given: RankInput, own: OwnStates) -> int:
    """The optimizer's states and step counters of a rank's shards [bytes]."""
    optimizer = OPTIMIZERS[given.setup.optimizer]
    counters = 0
    if optimizer.has_step_counter:
        each = allocated_bytes(1, given.formats.optimizer_states)
        counters = each * own.num_trained
    return optimizer.num_states * own.state_bytes + counters


def optimizer_copies_entry(given: RankInput, own: OwnStates, *, offloaded: bool) -> list[Entry]:
    """What the optimizer's step copies on the GPU."""
    copies = 0 if offloaded else OPTIMIZERS[given.setup.optimizer].num_step_copies
    return [
        Entry(
            ComponentKind.TEMPORARIES,
            copies * own.state_bytes,
            "copies the optimizer makes of a state",
        )
    ]


def load_entries(
    given: RankInput, options: Fsdp2Options, units: Units, *, offloaded: bool
) -> list[Entry]:
    """The GPU while the model is sharded, unit by unit, the root last."""
    shards, whole = _load_peak(units, options.init_device)
    if offloaded:
        shards = 0
    return [
        Entry(ComponentKind.PARAMETERS, shards, f"{given.formats.weights.label} shards"),
        buffer_entry(given.tape),
        Entry(ComponentKind.GATHERED_PARAMETERS, whole, "whole parameters that are being sharded"),
    ]


def _load_peak(units: Units, init_device: InitDevice) -> tuple[int, int]:
    """Shards and whole parameters at the fullest moment of sharding [bytes].

    A unit's parameters lie on the GPU beside their shards until all of them are sharded. Where the
    shards are filled later, the largest tensor passes through whole (accelerate 1.15,
    ``fsdp2_load_full_state_dict``).
    """
    if init_device is InitDevice.META:
        return shard_bytes(units), max((unit.largest_bytes for unit in units.all()), default=0)
    left = total_of(units, "whole_bytes") if init_device is InitDevice.CUDA else 0
    best, done = (0, left), 0
    for unit in [*units.layers.values(), *reversed(units.single())]:
        for _ in range(unit.num_copies):
            done += unit.shard_bytes
            whole = left if init_device is InitDevice.CUDA else unit.whole_bytes
            best = max(best, (done, whole), key=sum)
            left -= unit.whole_bytes
    return best


def _save_phase(options: Fsdp2Options, units: Units, held: list[Entry], *, gathers: bool) -> Phase:
    """Writing a checkpoint: a full one gathers tensor after tensor on the GPU."""
    largest = 0
    if gathers and options.state_dict_type is StateDictType.FULL:
        largest = max((unit.largest_bytes for unit in units.all()), default=0)
    gathered = Entry(
        ComponentKind.GATHERED_PARAMETERS, largest, "the largest tensor of a full checkpoint"
    )
    return make_phase("save", [*held, gathered])


def host_memory(
    given: RankInput,
    units: Units,
    own: OwnStates,
    *,
    offloaded: bool,
    init_device: InitDevice,
    state_dict_type: StateDictType,
    pinned: bool,
) -> HostMemory:
    """CPU RAM: what is offloaded, and the whole model while it is loaded or saved."""
    held = 0
    if offloaded:
        held = optimizer_bytes(given, own) + _offloaded_bytes(units, pinned=pinned)
    whole = total_of(units, "whole_bytes")
    # One rank of the job reads or gathers for all: its node's share of that.
    node_share = ceil_div(whole, given.setup.gpus_per_node)
    load = {
        InitDevice.CPU: whole,
        InitDevice.META: node_share,
        InitDevice.CUDA: 0,
    }[init_device]
    saved = node_share if state_dict_type is StateDictType.FULL else 0
    return HostMemory(held_bytes=held, load_bytes=load, save_bytes=held + saved)


def _offloaded_bytes(units: Units, *, pinned: bool) -> int:
    """Shards and their gradients on the CPU; pinned blocks are powers of two."""
    total = 0
    for unit in units.all():
        for shard in unit.shards:
            size = pinned_bytes(shard) if pinned else shard
            total += 2 * size * unit.num_copies
    return total
