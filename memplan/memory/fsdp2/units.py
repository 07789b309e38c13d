"""Units of FSDP2: which parameters are gathered and reduced together, and the sizes of that.

Parameters are split along their first dimension into equal chunks, the last ones padded (torch 2.13,
``_fsdp_param.py``: ``_init_sharded_param``); the figures are rank 0's, whose chunks are full.
"""

from collections.abc import Sequence
from math import prod

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, allocated_bytes
from memplan.graph.declaration import declared_parameters
from memplan.graph.operations.reduction import Multiprocessors
from memplan.memory.engine_options import frozen_format
from memplan.memory.fsdp2.options import Fsdp2Options, Wrapping
from memplan.memory.fsdp2.tables import copy_in_table_bytes, copy_out_table_bytes
from memplan.memory.rank import RankInput
from memplan.model.parameters import ModelPart, WeightRole
from memplan.units import ceil_div, round_up

ROOT, EMBEDDING, TAIL = "root", "embedding", "tail"


@dataclass(slots=True)
class Unit:
    """Parameters that are gathered and reduced together, and what they take on one rank [bytes]."""

    name: str
    reshard: bool
    degree: int = 1
    """Ranks over which its parameters are spread."""
    num_copies: int = 1
    """Equal units: the layers of a run."""
    parameters: list[Parameter] = field(default_factory=list)
    gathered: list[tuple[Parameter, int, bool]] = field(default_factory=list)
    """The parameters whole, each a tensor of its own, in the compute format, and whether its shards are of
    columns: they lie rank by rank first (``foreach_all_gather_copy_out``)."""
    gathered_bytes: int = 0
    """All of them."""
    all_gather_bytes: int = 0
    """The flat result of the all-gather."""
    gather_table_bytes: int = 0
    """What tells the kernel that copies that out which parameter is where."""
    copy_in_bytes: int = 0
    """The shards in the compute format, the input of the all-gather; 0 where they are in it already."""
    upload_bytes: int = 0
    """On the way from an offloaded shard to the all-gather's input, beside what is made of it."""
    largest_cast_numel: int = 0
    """Elements of the largest shard that is cast to fp8 before it is gathered; 0 where none is."""
    shard_bytes: int = 0
    """The shards as they are kept."""
    largest_bytes: int = 0
    """The largest parameter, whole, in the format it is kept in."""
    whole_bytes: int = 0
    """All parameters, whole, in the format they are kept in."""
    whole_gradient_bytes: int = 0
    """Whole gradients in the format they are reduced in, each a tensor of its own."""
    last_gradient_bytes: int = 0
    """The gradient of the unit's last parameter: a loop variable holds it until the reduction is
    over. 0 for layers, whose last parameters are norms or biases."""
    reduce_input_bytes: int = 0
    reduce_table_bytes: int = 0
    """What tells the kernel that fills that which gradient is whose: a number for each of its blocks."""
    reduce_output_bytes: int = 0
    gradient_shard_bytes: int = 0
    """The shards' gradients: views of one tensor."""
    num_trained: int = 0
    casts_reduced: bool = False
    """Reduced gradients are cast to the format that their shards are kept in."""
    shards: list[int] = field(default_factory=list)
    """Each parameter's shard as it is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFormats:
    """The formats that decide a unit's sizes."""

    degree: int
    """Ranks over which a parameter is spread."""
    kept: DType
    frozen: DType
    """Weights that are not trained. Beside an adapter they stay as they are loaded: accelerate casts to
    fp32 what is trained alone (accelerate 1.15, ``fsdp2_prepare_model``, ``prepare_model``)."""
    compute: DType
    reduce: DType
    states: DType
    offloaded: bool
    device: Multiprocessors | None = None
    """By which the copy out of an all-gather is cut; None: scratch inside kernels is left out."""

    @classmethod
    def of(cls, given: RankInput, options: Fsdp2Options, *, offloaded: bool) -> "UnitFormats":
        """Those of a setup."""
        formats = given.formats
        return cls(
            degree=options.shard_degree(given.setup),
            device=given.reducing_device,
            kept=formats.weights,
            frozen=frozen_format(given.setup),
            compute=formats.compute,
            reduce=options.reduce_dtype or formats.compute,
            states=formats.optimizer_states,
            offloaded=offloaded,
        )

    def degree_of(self, parameter: Parameter) -> int:
        """Ranks over which it is spread: an expert's weights over those that have the same experts."""
        return self.degree // num_spread(parameter)

    def place_of(self, parameter: Parameter, place: int) -> int:
        """Which of them a rank is: those that have other experts stand side by side."""
        return place // num_spread(parameter)

    def is_apart(self, parameter: Parameter) -> bool:
        """Whether a weight keeps a format of its own: an adapter's, where no policy casts it."""
        return parameter.of_adapter and self.kept is self.compute

    def kept_of(self, parameter: Parameter) -> DType:
        """What a weight's shard is kept in."""
        if self.is_apart(parameter) or parameter.packed is not None:
            return parameter.dtype
        return self.kept if parameter.requires_grad else self.frozen

    def compute_of(self, parameter: Parameter) -> DType:
        """What a weight's gradient is computed in, and the weight itself but for codes."""
        own = self.is_apart(parameter) or parameter.packed is not None
        return parameter.dtype if own else self.compute

    def gathered_of(self, parameter: Parameter) -> DType:
        """What a gathered weight is: the compute format, or codes."""
        return DType.FP8 if parameter.gathered_as is DType.FP8 else self.compute_of(parameter)

    def reduce_of(self, parameter: Parameter) -> DType:
        """What a weight's gradient is reduced in."""
        apart = self.is_apart(parameter) and self.reduce is self.compute
        return parameter.dtype if apart else self.reduce

    def states_of(self, parameter: Parameter) -> DType:
        """What the optimizer's states of a weight are held in."""
        return parameter.dtype if self.is_apart(parameter) else self.states


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStates:
    """What the optimizer keeps on some ranks."""

    places: range
    """Among the ranks over which the parameters are spread."""
    state_bytes: int
    """One state of everything that it steps on."""
    num_trained: int
    """Tensors that it steps on."""


@dataclass(slots=True)
class Units:
    """All units of a model."""

    root: Unit
    layers: dict[int, Unit]
    """For each segment of layers, by its index."""
    embedding: Unit | None = None
    tail: Unit | None = None
    """Final norm and output matrix; the tied embedding too."""
    beside: dict[int, Unit] = field(default_factory=dict)
    """What is trained of a segment whose other weights are frozen, by its index: FSDP1 wraps each such
    module by itself (peft's ``fsdp_auto_wrap_policy``). Of FSDP2, experts that are spread over ranks: a
    second group of parameters of the same module (``ShardPlacementResult``)."""
    tied: bool = False
    """The tail holds the embedding."""
    of_parameter: dict[Parameter, Unit] = field(default_factory=dict)

    def all(self) -> list[Unit]:
        """Those that own parameters, the root first."""
        wrapped = [*self.layers.values(), *self.beside.values()]
        return [*self.single(), *(unit for unit in wrapped if unit.parameters)]

    def single(self) -> list[Unit]:
        """Those beside the layers that own parameters, in the order of the module tree."""
        found = [self.root, self.embedding, self.tail]
        return [unit for unit in found if unit is not None and unit.parameters]


def is_layer(segment: Segment) -> bool:
    """Whether the segment is a run of layers, each of which is wrapped; or of parts of them."""
    return segment.repeat > 1 or segment.is_layer


def find_units(tape: Tape, options: Fsdp2Options, formats: UnitFormats) -> Units:
    """Sort a model's parameters into units and measure them."""
    reshard = options.reshard_after_forward
    root = Unit(ROOT, reshard=bool(reshard))
    units = Units(root=root, layers={})
    if options.wrapping is not Wrapping.LAYERS:
        root.reshard = False
        units.tied = is_tied(tape)
        units.tail = Unit(TAIL, reshard=False)
        units.embedding = (
            units.tail if units.tied else Unit(EMBEDDING, reshard=reshard is not False)
        )
    declared: dict[int, list[Parameter]] = {}
    for segment, parameters in declared_parameters(tape):
        declared.setdefault(segment.index, []).extend(parameters)
    for segment in tape.segments:
        if is_layer(segment):
            unit = Unit(segment.name, reshard=reshard is not False, num_copies=segment.num_copies)
            units.layers[segment.index] = unit
            own = children_first(declared.get(segment.index, []))
            unit.parameters = [each for each in own if not is_spread(each)]
            units.of_parameter.update(dict.fromkeys(segment.parameters, unit))
            spread = [each for each in own if is_spread(each)]
            if spread:
                experts = Unit(segment.name, reshard=unit.reshard, num_copies=segment.num_copies)
                experts.parameters = spread
                units.beside[segment.index] = experts
                units.of_parameter.update(dict.fromkeys(spread, experts))
            continue
        for parameter in segment.parameters:
            unit = _owner(units, segment, parameter)
            unit.parameters.append(parameter)
            units.of_parameter[parameter] = unit
    if units.embedding is units.tail:
        units.embedding = None
    for unit in units.all():
        _measure(unit, formats)
    for unit in units.single():
        _find_last_gradient(unit, formats)
    return units


def children_first(parameters: Sequence[Parameter], depth: int = 0) -> list[Parameter]:
    """A module's own parameters behind those of the modules in it, as FSDP2 comes to them (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_init.py, ``_get_managed_modules``)."""
    own: list[Parameter] = []
    children: dict[str, list[Parameter]] = {}
    for each in parameters:
        path = each.module.split(".") if each.module else []
        (own if len(path) <= depth else children.setdefault(path[depth], [])).append(each)
    found = [each for inside in children.values() for each in children_first(inside, depth + 1)]
    return found + own


def whole_unit(parameters: list[Parameter], formats: UnitFormats, *, reshard: bool) -> Unit:
    """A model that is one unit, its parameters in the order of ``named_parameters()``."""
    unit = Unit(ROOT, reshard=reshard, parameters=parameters)
    _measure(unit, formats)
    return unit


def _owner(units: Units, segment: Segment, parameter: Parameter) -> Unit:
    if units.embedding is not None and parameter.role is WeightRole.TOKEN_TABLE:
        return units.embedding
    if units.tail is not None and (segment.part in (ModelPart.NORM, ModelPart.HEAD)):
        return units.tail
    return units.root


def is_tied(tape: Tape) -> bool:
    """Whether a later segment reads the token table."""
    return tied_table(tape) is not None


def tied_table(tape: Tape) -> Parameter | None:
    """The token table that a later segment reads too: the model's first weight, or one of a later part (Whisper's)."""
    weights = [
        (segment, parameter) for segment in tape.segments for parameter in segment.parameters
    ]
    tables = [
        (segment, parameter)
        for segment, parameter in weights
        if parameter.role in _TABLES or parameter is weights[0][1]
    ]
    return next((each for segment, each in tables if _is_read(tape, segment, each)), None)


_TABLES = frozenset({WeightRole.TOKEN_TABLE, WeightRole.TABLE})


def _is_read(tape: Tape, segment: Segment, parameter: Parameter) -> bool:
    return any(
        parameter in operation.inputs
        for later in tape.segments[segment.index + 1 :]
        for operation in later.operations
    )


def _measure(unit: Unit, formats: UnitFormats) -> None:
    unit.degree = degree = formats.degree_of(unit.parameters[0])
    _check_columns(unit)
    chunk_bytes = cast_bytes = 0
    for parameter in unit.parameters:
        chunk = shard_numel(parameter, degree)
        kept, gathered_as = formats.kept_of(parameter), formats.gathered_of(parameter)
        chunk_bytes += chunk * gathered_as.num_bytes
        unit.largest_cast_numel = max(
            unit.largest_cast_numel, chunk if gathered_as is DType.FP8 else 0
        )
        shard_bytes = allocated_bytes(chunk, kept)
        whole = allocated_bytes(parameter.numel * parameter.ranks, kept)
        unit.shard_bytes += shard_bytes
        unit.shards.append(chunk * kept.num_bytes)
        unit.whole_bytes += whole
        unit.largest_bytes = max(unit.largest_bytes, whole)
        size = allocated_bytes(chunk * degree, gathered_as)
        unit.gathered_bytes += size
        unit.gathered.append((parameter, size, bool(cut_dimension(parameter, degree))))
        is_cast = formats.compute_of(parameter) is not kept
        if is_cast or formats.offloaded:
            cast_bytes += chunk * gathered_as.num_bytes
        if is_cast and formats.offloaded:
            unit.upload_bytes = max(unit.upload_bytes, shard_bytes)
    unit.copy_in_bytes = round_up(cast_bytes, ALLOCATION_ROUNDING)
    unit.all_gather_bytes = round_up(chunk_bytes * degree, ALLOCATION_ROUNDING)
    if degree > 1 and formats.device is not None:
        chunks = [
            shard_numel(each, degree) * formats.gathered_of(each).num_bytes
            for each in unit.parameters
        ]
        unit.gather_table_bytes = copy_out_table_bytes(chunks, degree, formats.device)
    _measure_gradients(unit, formats)


def _check_columns(unit: Unit) -> None:
    """Refuse columns that do not divide (``foreach_reduce``: Shard(1) requires even sharding)."""
    for parameter in unit.parameters:
        if not cut_dimension(parameter, unit.degree):
            continue
        share, rest = divmod(parameter.shape[1], unit.degree)
        if rest:
            msg = (
                f"expert_parallel: {parameter.name} has {parameter.shape[1]} columns, which the {unit.degree} "
                f"ranks that have the same experts cannot share evenly: {parameter.shape[1]} = {unit.degree} x "
                f"{share} + {rest}"
            )
            raise SetupError(msg)


def _measure_gradients(unit: Unit, formats: UnitFormats) -> None:
    """What is reduced of a unit; its gradients are of one format.

    Raises ``SetupError`` for trained weights of several (torch's ``_init_mp_dtypes``).
    """
    trained = [each for each in unit.parameters if each.requires_grad and not each.unused]
    unit.num_trained = len(trained)
    if not trained:
        return
    kept, reduce = formats.kept_of(trained[0]), formats.reduce_of(trained[0])
    for each in trained:
        if formats.kept_of(each) is not kept:
            msg = (
                f"adapter: FSDP2 trains one format in each unit, and {each.name} is "
                f"{formats.kept_of(each).label} beside {kept.label}: give the adapter's dtype as "
                f"{formats.compute.label}"
            )
            raise SetupError(msg)
    unit.casts_reduced = reduce is not kept
    unit.whole_gradient_bytes = sum(allocated_bytes(each.numel, reduce) for each in trained)
    reduced = sum(shard_numel(each, unit.degree) for each in trained)
    unit.reduce_input_bytes = allocated_bytes(reduced * unit.degree, reduce)
    given = formats.compute_of(trained[0])
    # No other pair of formats has a kernel of its own.
    if given is reduce or (given, reduce) == (DType.BF16, DType.FP32):
        chunks = [shard_numel(each, unit.degree) * reduce.num_bytes for each in trained]
        unit.reduce_table_bytes = copy_in_table_bytes(chunks)
    unit.reduce_output_bytes = allocated_bytes(reduced, reduce)
    unit.gradient_shard_bytes = allocated_bytes(reduced, kept)


def _find_last_gradient(unit: Unit, formats: UnitFormats) -> None:
    """``foreach_reduce`` loops over the gradients only where there is more than one rank."""
    trained = [each for each in unit.parameters if each.requires_grad and not each.unused]
    if trained and formats.degree > 1:
        unit.last_gradient_bytes = allocated_bytes(
            trained[-1].numel, formats.compute_of(trained[-1])
        )


def shard_numel(parameter: Parameter, degree: int) -> int:
    """Elements of the largest of a parameter's chunks along its first dimension [elements]."""
    if not parameter.shape:
        return parameter.numel
    size = parameter.shape[cut_dimension(parameter, degree)]
    return ceil_div(size, degree) * (parameter.numel // size)


def is_spread(parameter: Parameter) -> bool:
    """Whether other ranks have other experts than a weight has: it is of a mesh of its own."""
    return parameter.experts is not None and parameter.experts.spread > 1


def num_spread(parameter: Parameter) -> int:
    """Ranks of the data that have other experts than a weight has."""
    experts = parameter.experts
    return 1 if experts is None else max(1, experts.spread // experts.splitting)


def cut_dimension(parameter: Parameter, degree: int) -> int:
    """The first; of spread experts that are fewer than ranks, the second (torchtitan's ``fsdp.py``)."""
    return int(is_spread(parameter) and degree > parameter.shape[0])


def own_numel(parameter: Parameter, degree: int, place: int) -> int:
    """Elements of a rank's own chunk: full ones come first, what is left over last [elements].

    Shards are padded to the largest; what the optimizer keeps is not (torch's ``chunk``).
    """
    return prod(own_shape(parameter, degree, place))


def own_shape(parameter: Parameter, degree: int, place: int) -> tuple[int, ...]:
    """The shape of that chunk: rows of the parameter."""
    if not parameter.shape:
        return ()
    cut = cut_dimension(parameter, degree)
    size = parameter.shape[cut]
    rows = ceil_div(size, degree)
    own = max(0, min(rows, size - place * rows))
    return (*parameter.shape[:cut], own, *parameter.shape[cut + 1 :])


def places_alike(units: Units, degree: int) -> list[range]:
    """Places whose chunks are equally large, in runs."""
    ends = {degree}
    for parameter in _trained(units):
        if parameter.shape:
            spread = num_spread(parameter)
            size = parameter.shape[cut_dimension(parameter, degree // spread)]
            rows = ceil_div(size, degree // spread)
            full = size // rows
            ends |= {full * spread, (full + bool(size % rows)) * spread}
    stops = sorted(end for end in ends if 0 < end <= degree)
    return [range(first, stop) for first, stop in zip([0, *stops[:-1]], stops, strict=True)]


def own_states(units: Units, formats: UnitFormats, places: range) -> OwnStates:
    """What the optimizer keeps where chunks are as large as on the first of these places."""
    size = count = 0
    for unit in units.all():
        for parameter in unit.parameters:
            if parameter.requires_grad and not parameter.unused:
                place = formats.place_of(parameter, places.start)
                own = own_numel(parameter, formats.degree_of(parameter), place)
                size += allocated_bytes(own, formats.states_of(parameter)) * unit.num_copies
                count += unit.num_copies
    return OwnStates(places=places, state_bytes=size, num_trained=count)


def _trained(units: Units) -> list[Parameter]:
    return [each for unit in units.all() for each in unit.parameters if each.requires_grad]
