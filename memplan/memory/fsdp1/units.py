"""Units of FSDP1: each one's parameters lie end to end in one flat parameter.

Sizes as ``FlatParamHandle`` makes them (torch 2.13, ``_flat_param.py``); they are the same on every
rank, but for what the optimizer keeps of each original parameter.
"""

from dataclasses import field

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, allocated_bytes
from memplan.memory.fsdp1.options import AutoWrap, Fsdp1Options
from memplan.memory.fsdp2.units import ROOT, OwnStates, Unit, UnitFormats, Units, is_layer
from memplan.units import ceil_div, round_up

ALIGNMENT_BYTES = 16
"""With ``use_orig_params`` each parameter begins at a multiple of this (``_get_aligned_numel``)."""


@dataclass(slots=True)
class FlatUnit(Unit):
    """A flat parameter and what it takes on one rank [bytes]."""

    flat_gradient_bytes: int = 0
    """The gradients joined into one, in the compute format."""
    cast_gradient_bytes: int = 0
    """The same in the format of the reduction, where that is another."""
    padded_gradient_bytes: int = 0
    """A copy that is padded to a multiple of the ranks, where it has to be."""
    sharded: bool = True
    mixed: bool = False
    """It is computed with in another format than it is kept in."""
    shard_numel: int = 0
    """Elements of a rank's part, padding included."""
    compute_shard_bytes: int = 0
    """That part in the compute format."""
    padded_bytes: int = 0
    """The flat parameter in the format it is kept in, padded to a multiple of the ranks."""
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Where what the optimizer steps on begins and ends in the flat parameter."""


def find_flat_units(
    tape: Tape, options: Fsdp1Options, formats: UnitFormats, *, keeps_whole: bool
) -> Units:
    """Sort a model's parameters into flat parameters and measure them.

    ``keeps_whole``: parameters stay gathered from forward to backward (SHARD_GRAD_OP).
    """
    sharded = formats.degree > 1
    root = FlatUnit(ROOT, reshard=not sharded, sharded=sharded)
    units = Units(root=root, layers={})
    for segment in tape.segments:
        unit: FlatUnit = root
        if is_layer(segment) and options.wrapping is AutoWrap.LAYERS:
            unit = FlatUnit(
                segment.name,
                reshard=not keeps_whole or not sharded,
                num_copies=segment.num_copies,
                sharded=sharded,
            )
            units.layers[segment.index] = unit
        copies = 1 if unit is not root else segment.num_copies
        for parameter in segment.parameters:
            own = unit
            if _is_wrapped_alone(tape, options, parameter):
                own = _beside(units, segment, keeps_whole=keeps_whole, sharded=sharded)
            own.parameters += [parameter] * (copies if own is root else 1)
            units.of_parameter[parameter] = own
    for each in units.all():
        assert isinstance(each, FlatUnit)
        _measure(each, options, formats)
    return units


def _is_wrapped_alone(tape: Tape, options: Fsdp1Options, parameter: Parameter) -> bool:
    """Whether peft's policy wraps a weight's module by itself: one that is trained, beside an adapter."""
    wrapped = tape.adaptation is not None and options.wrapping is AutoWrap.LAYERS
    return wrapped and parameter.of_adapter and parameter.requires_grad


def _beside(units: Units, segment: Segment, *, keeps_whole: bool, sharded: bool) -> FlatUnit:
    """The unit of what is trained in a segment.

    peft's policy makes one of each module; here they are gathered and reduced together, which is more by
    at most the other adapters of one layer.
    """
    found = units.beside.get(segment.index)
    if found is None:
        found = FlatUnit(
            f"{segment.name}, trained", reshard=not keeps_whole or not sharded,
            num_copies=segment.num_copies, sharded=sharded,
        )  # fmt: skip
        units.beside[segment.index] = found
    assert isinstance(found, FlatUnit)
    return found


def _measure(unit: FlatUnit, options: Fsdp1Options, formats: UnitFormats) -> None:
    degree, first = formats.degree, unit.parameters[0]
    compute, kept = formats.compute_of(first), formats.kept_of(first)
    reduce = formats.reduce_of(first)
    numels = [parameter.numel for parameter in unit.parameters]
    flat = sum(numels)
    if options.use_orig_params:
        step = ALIGNMENT_BYTES // compute.num_bytes
        flat = sum(round_up(numel, step) for numel in numels[:-1]) + numels[-1]
        flat = round_up(flat, degree)
    shard = ceil_div(flat, degree)
    mixed = unit.mixed = compute is not kept
    unit.shard_bytes = allocated_bytes(shard, kept)
    unit.shards = [shard * kept.num_bytes]
    unit.shard_numel = shard
    unit.compute_shard_bytes = allocated_bytes(shard, compute)
    unit.padded_bytes = allocated_bytes(shard * degree, kept)
    unit.whole_bytes = allocated_bytes(flat, kept)
    unit.largest_bytes = unit.whole_bytes
    if unit.sharded:
        unit.gathered_bytes = allocated_bytes(shard * degree, compute)
        # What is gathered: a copy in the compute format, or an offloaded shard on the GPU.
        if mixed or formats.offloaded:
            unit.copy_in_bytes = allocated_bytes(shard, compute)
        unit.upload_bytes = unit.shard_bytes if formats.offloaded and mixed else 0
    elif mixed:
        unit.gathered_bytes = allocated_bytes(flat, compute)
    if not any(parameter.requires_grad for parameter in unit.parameters):
        return
    unit.flat_gradient_bytes = allocated_bytes(flat, compute)
    unit.whole_gradient_bytes = unit.flat_gradient_bytes
    if reduce is not compute:
        unit.cast_gradient_bytes = allocated_bytes(flat, reduce)
    if flat % degree:
        unit.padded_gradient_bytes = allocated_bytes(shard * degree, reduce)
    unit.casts_reduced = reduce is not kept
    unit.reduce_output_bytes = allocated_bytes(shard, reduce)
    unit.gradient_shard_bytes = allocated_bytes(shard, kept)
    unit.trained = _trained(unit, options, formats)


def _trained(unit: FlatUnit, options: Fsdp1Options, formats: UnitFormats) -> list[tuple[int, int]]:
    if not options.use_orig_params:
        return [(0, unit.shard_numel * formats.degree)]
    found = []
    begin = 0
    step = ALIGNMENT_BYTES // formats.compute.num_bytes
    for parameter in unit.parameters:
        if parameter.requires_grad:
            found.append((begin, begin + parameter.numel))
        begin += round_up(parameter.numel, step)
    return found


def flat_places(
    unit: FlatUnit, options: Fsdp1Options, formats: UnitFormats, place: int = 0
) -> list[tuple[Parameter, int, int]]:
    """Of each of a unit's parameters, and each copy of it there: the elements in one rank's part."""
    found = []
    seen: dict[Parameter, int] = {}
    begin = 0
    step = ALIGNMENT_BYTES // formats.compute.num_bytes if options.use_orig_params else 1
    own = place * unit.shard_numel
    for parameter in unit.parameters:
        copy = seen[parameter] = seen.get(parameter, -1) + 1
        end = begin + parameter.numel
        numel = min(end, own + unit.shard_numel) - max(begin, own)
        found.append((parameter, copy, max(numel, 0)))
        begin += round_up(parameter.numel, step)
    return found


def own_states(units: Units, formats: UnitFormats) -> list[OwnStates]:
    """What each rank's optimizer keeps, ranks with the same in runs."""
    changes: dict[int, tuple[int, int]] = {0: (0, 0)}

    def add(places: range, numel: int, copies: int, states: DType) -> None:
        size = allocated_bytes(numel, states) * copies
        for place, sign in ((places.start, 1), (places.stop, -1)):
            before = changes.get(place, (0, 0))
            changes[place] = (before[0] + sign * size, before[1] + sign * copies)

    for unit in units.all():
        assert isinstance(unit, FlatUnit)
        shard, states = unit.shard_numel, formats.states_of(unit.parameters[0])
        for begin, end in unit.trained:
            first, last = begin // shard, (end - 1) // shard
            for place in {first, last}:
                piece = min(end, (place + 1) * shard) - max(begin, place * shard)
                add(range(place, place + 1), piece, unit.num_copies, states)
            if last - first > 1:
                add(range(first + 1, last), shard, unit.num_copies, states)
    found = []
    starts = sorted(place for place in changes if place < formats.degree)
    size = count = 0
    for start, stop in zip(starts, [*starts[1:], formats.degree], strict=True):
        size, count = size + changes[start][0], count + changes[start][1]
        found.append(OwnStates(places=range(start, stop), state_bytes=size, num_trained=count))
    return found


def heaviest_states(kinds: list[OwnStates]) -> list[OwnStates]:
    """Those that no other outweighs both in bytes and in tensors, the first of equals."""
    found: list[OwnStates] = []
    for each in sorted(kinds, key=lambda kind: (-kind.state_bytes, -kind.num_trained)):
        if not found or each.num_trained > found[-1].num_trained:
            found.append(each)
    return found
