"""Units of FSDP1: each one's parameters lie end to end in one flat parameter.

Sizes as ``FlatParamHandle`` makes them (torch 2.13, ``_flat_param.py``); the figures are rank 0's.
"""

from memplan.graph.tape import Tape
from memplan.graph.tensors import allocated_bytes
from memplan.memory.fsdp1.options import AutoWrap, Fsdp1Options
from memplan.memory.fsdp2.units import ROOT, Unit, UnitFormats, Units, is_layer
from memplan.records import dataclass
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
            unit.parameters += [parameter] * copies
            units.of_parameter[parameter] = unit
    for each in units.all():
        assert isinstance(each, FlatUnit)
        _measure(each, options, formats)
    return units


def _measure(unit: FlatUnit, options: Fsdp1Options, formats: UnitFormats) -> None:
    degree, compute, kept, reduce = formats.degree, formats.compute, formats.kept, formats.reduce
    numels = [parameter.numel for parameter in unit.parameters]
    flat = sum(numels)
    if options.use_orig_params:
        step = ALIGNMENT_BYTES // compute.num_bytes
        flat = sum(round_up(numel, step) for numel in numels[:-1]) + numels[-1]
        flat = round_up(flat, degree)
    shard = ceil_div(flat, degree)
    mixed = compute is not kept
    unit.shard_bytes = allocated_bytes(shard, kept)
    unit.shards = [shard * kept.num_bytes]
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
    unit.reduce_output_bytes = allocated_bytes(shard, reduce)
    unit.gradient_shard_bytes = allocated_bytes(shard, kept)
    unit.state_bytes, unit.num_trained = _states(unit, options, formats, numels, shard)


def _states(
    unit: Unit, options: Fsdp1Options, formats: UnitFormats, numels: list[int], shard: int
) -> tuple[int, int]:
    """Bytes of one optimizer state, and how many tensors the optimizer steps on rank 0."""
    if not options.use_orig_params:
        return allocated_bytes(shard, formats.states), 1
    total = count = begun = 0
    for parameter, numel in zip(unit.parameters, numels, strict=True):
        own = min(numel, shard - begun)
        if own <= 0:
            break
        begun += numel
        if parameter.requires_grad:
            total += allocated_bytes(own, formats.states)
            count += 1
    return total, count
