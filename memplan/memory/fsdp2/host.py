"""CPU RAM of one rank under FSDP: what is offloaded, and the model while it is loaded or saved."""

from memplan.graph.core.tensors import allocated_bytes
from memplan.memory.account import HostMemory
from memplan.memory.fsdp2.options import InitDevice, StateDictType
from memplan.memory.fsdp2.units import OwnStates, Units
from memplan.memory.host import pinned_bytes
from memplan.memory.rank import RankInput
from memplan.training.optimizers.script import ActKind, Stepped, states_of
from memplan.training.optimizers.table import chosen
from memplan.units import ceil_div


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
    held = shards = 0
    if offloaded:
        shards = _offloaded_bytes(units, pinned=pinned)
        held = optimizer_bytes(given, own) + shards
    whole = total_of(units, "whole_bytes")
    # One rank of the job reads or gathers for all: its node's share of that.
    node_share = ceil_div(whole, given.setup.gpus_per_node)
    load = {
        InitDevice.CPU: whole,
        InitDevice.META: node_share,
        InitDevice.TO_EMPTY: 0,
        InitDevice.CUDA: 0,
    }[init_device]
    saved = node_share if state_dict_type is StateDictType.FULL else 0
    return HostMemory(
        held_bytes=held, load_bytes=load, save_bytes=held + saved, pinned_bytes=shards * pinned
    )


def _offloaded_bytes(units: Units, *, pinned: bool) -> int:
    """Shards and their gradients on the CPU; pinned blocks are powers of two."""
    total = 0
    for unit in units.all():
        for shard in unit.shards:
            size = pinned_bytes(shard) if pinned else shard
            total += 2 * size * unit.num_copies
    return total


def optimizer_bytes(given: RankInput, own: OwnStates) -> int:
    """The optimizer's states and step counters of a rank's shards [bytes].

    Only optimizers that step element by element run on the CPU: each state is as large as its shard.
    """
    setup, dtype = given.setup, given.formats.optimizer_states
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    states = states_of(row, options, Stepped((1,), dtype))
    counters = [act for act in states if act.kind is ActKind.COUNTER]
    alike = len(states) - len(counters)
    return alike * own.state_bytes + len(counters) * allocated_bytes(1, dtype) * own.num_trained


def total_of(units: Units, name: str) -> int:
    """A size added up over all units of a rank [bytes]."""
    return sum(int(getattr(unit, name)) * unit.num_copies for unit in units.all())
