"""Which runs are outlined alike: all that an outline depends on of a model, an engine's settings and a rank.

Batches of one structure share an outline (``memplan.memory.outline``); what is not told apart here has to be
shown by the passes that it is laid over.
"""

from functools import lru_cache
from operator import attrgetter

from memplan.fast_dataclass import dataclass, fields
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.remembered import OF_TAPES
from memplan.memory.beside import ALONE, Beside
from memplan.memory.engine_options import reduces_each_micro_batch
from memplan.memory.passes import BackwardPass, StepPasses
from memplan.memory.programs import holds_inputs, loads_by_capacity, stops_of
from memplan.memory.rank import RankInput
from memplan.memory.spots import Spots
from memplan.training.choices_of_kernels.kernels import TILED_LOSSES
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import PLAIN_OPTIMIZERS, TrainingSetup

MICRO_BATCHES = 3
"""A step's first micro-batch, any one after it, and its last: no further one holds more."""
REMEMBERED = 1024
"""Outlines that are kept: more than a sweep meets between two of the same kind."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Asked:
    """A run of which any rank may be asked for."""

    given: RankInput
    spots: Spots
    """Where its engine finds the model."""
    run: "_Run"
    goes_by_capacity: bool
    """What is loaded how depends on how much a card holds."""


def asked_of(given: RankInput) -> Asked:
    """A run, with all that its outline depends on."""
    beside, within = given.beside, None
    if given.stages:
        spots, structure = _staged(given)
    else:
        within = stops_of(given)
        stops = None if within is None else within.stops
        spots = _spots(_Same(given.passes), _Same(stops), _Same(beside))
        structure = _structure(_Same(given.tape), _Same(given.passes))
    if beside is not ALONE:
        structure = _joint_structure(structure, _Same(beside))
    if within is not None:
        structure = _cut_structure(structure, _Same(spots), _Same(within.members))
    run = _run(structure, (*_engine_fields(given.setup), _reducing_device(given)))
    return Asked(given=given, spots=spots, run=run, goes_by_capacity=loads_by_capacity(given.setup))


class Question:
    """A rank of a run, told apart by all that its outline depends on."""

    __slots__ = ("_asked", "capacity_bytes", "key", "rank")

    def __init__(self, asked: Asked, rank: int, capacity_bytes: int | None = None) -> None:
        self._asked: Asked | None = asked
        self.rank = rank
        self.capacity_bytes = capacity_bytes
        self.key = (asked.run, rank, self.capacity_bytes)

    @property
    def asked(self) -> Asked:
        """Of what, as long as it is not answered."""
        assert self._asked is not None
        return self._asked

    def taken(self) -> tuple[RankInput, Spots]:
        """What it is answered from; a question that is remembered does not keep it."""
        asked, self._asked = self.asked, None
        return asked.given, asked.spots

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and other.key == self.key


_SAID_OTHERWISE = {
    "num_gpus", "num_nodes", "precision", "gradient_accumulation_steps",
}  # fmt: skip
_SAID_BY_THE_TAPE = {
    "micro_batch_size", "seq_len", "target_seq_len", "checkpointing", "kernels", "attention", "norm",
    "mlp", "rotary", "loss", "packing", "dropout", "freeze", "adapter", "outputs_held",
    "upcast_outputs", "job", "ema", "evaluation", "lengths", "left_out", "fp8", "images_per_sample", "image_size",
    "image_width", "num_frames", "audio_seconds",
}  # fmt: skip
"""Settings of the model alone: its segments and its gradients show what they change."""
_OF_A_REPLAY = {"allocator"}
_engine_values = attrgetter(
    *(
        each.name
        for each in fields(TrainingSetup)
        if each.name not in _SAID_OTHERWISE | _SAID_BY_THE_TAPE | _OF_A_REPLAY
    )
)


def _engine_fields(setup: TrainingSetup) -> tuple[object, ...]:
    return (
        _formats_of(setup),
        reduces_each_micro_batch(setup),
        min(setup.gradient_accumulation_steps, MICRO_BATCHES),
        setup.gpus_per_node,
        (setup.num_gpus, setup.nodes),
        (
            setup.micro_batch_size,
            setup.seq_len,
            setup.target_seq_len,
            setup.images_per_sample,
            setup.image_size,
            setup.image_width,
            setup.num_frames,
            setup.audio_seconds,
        )
        if holds_inputs(setup)
        else None,
        *_engine_values(setup),
    )


def _reducing_device(given: RankInput) -> object:
    """What an optimizer's own reductions are split by, where it has any, and what FSDP2 copies out."""
    is_asked = (
        given.setup.optimizer not in PLAIN_OPTIMIZERS or given.setup.chosen_engine is Engine.FSDP
    )
    return given.reducing_device if is_asked else None


def _formats_of(setup: TrainingSetup) -> tuple[object, ...]:
    """fp16 and bf16 take the same bytes; but engine options name formats, to which a model's are
    compared."""
    formats = PRECISIONS[setup.chosen_precision]
    own = (formats.weights, formats.compute, formats.gradients)
    if setup.engine_options:
        return (*own, formats.optimizer_states, formats.master_weights)
    widths = tuple(each.num_bytes for each in own)
    return (*widths, formats.optimizer_states, formats.master_weights)


class _Same:
    """A value that is told apart by itself."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def unstopped_spots(given: RankInput) -> Spots:
    """Where somebody finds the model who takes part within no segment of it."""
    if given.stages:
        return _staged(given)[0]
    return _spots(_Same(given.passes), _Same(None), _Same(given.beside))


@OF_TAPES.remembered(maxsize=64)
def _spots(passes: _Same, stops: _Same, beside: _Same) -> Spots:
    """Where an engine that stops there finds the model, and those beside it."""
    assert isinstance(passes.value, StepPasses)
    assert isinstance(beside.value, Beside)
    spots = Spots(passes.value, stops.value if isinstance(stops.value, dict) else {})
    for each in beside.value.models:
        within = stops_of(each) if each.is_sharded or each.is_trained else None
        own = Spots(each.passes, {} if within is None else within.stops, spots)
        spots.others.append(own)
    return spots


def _staged(given: RankInput) -> "tuple[Spots, _Structure]":
    """Of a pipeline: the spots of all its stages, and of those between steps, and what an outline depends on of them."""
    from memplan.memory.programs.pipeline_plan import ends_of  # only for pipelines

    unlike = dict.fromkeys(given.stages)
    walks = [*(stage.passes for stage in unlike), *(each.passes for each in given.beside.models)]
    spots = _spots_of_stages(tuple(dict.fromkeys(map(_Same, walks))))
    numbers = {stage: number for number, stage in enumerate(unlike)}
    first = {stage: number for number, stage in reversed([*enumerate(given.stages)])}
    key = (
        given.setup.num_gpus,
        given.setup.gradient_accumulation_steps,
        tuple(numbers[stage] for stage in given.stages),
        tuple(_same_stage(_Same(each.tape), _Same(each.passes)) for each in unlike),
        ends_of(given, [first[stage] for stage in unlike]),
    )
    return spots, _interned(*key)


@OF_TAPES.remembered(maxsize=256)
def _same_stage(tape: _Same, passes: _Same) -> tuple[object, ...]:
    assert isinstance(tape.value, Tape)
    return _structure(tape, passes), tape.value.options.stage


@OF_TAPES.remembered(maxsize=64)
def _spots_of_stages(unlike: "tuple[_Same, ...]") -> Spots:
    main: Spots | None = None
    for each in unlike:
        assert isinstance(each.value, StepPasses)
        own = Spots(each.value, {}, main)
        if main is None:
            main = own
        else:
            main.others.append(own)
    assert main is not None
    return main


# -- structure -----------------------------------------------------------------------------------------


@OF_TAPES.remembered(maxsize=256)
def _structure(tape: _Same, passes: _Same) -> "_Structure":
    assert isinstance(tape.value, Tape)
    assert isinstance(passes.value, StepPasses)
    return _interned(
        tuple((each.num_bytes, each.made_bytes) for each in tape.value.buffers),
        tape.value.buffers_in_use,
        tape.value.declared,
        _tiled_loss(tape.value),
        tuple(_outline_of(segment) for segment in tape.value.segments),
        tuple(each.repeats for each in passes.value.forward),
        tuple(_order_of(each) for each in passes.value.backward),
    )


@OF_TAPES.remembered(maxsize=256)
def _cut_structure(structure: "_Structure", spots: _Same, members: _Same) -> "_Structure":
    """The same where an engine takes part within segments: in which order it does what."""
    assert isinstance(spots.value, Spots)
    return _interned(structure, spots.value.acts, members.value)


@OF_TAPES.remembered(maxsize=256)
def _joint_structure(structure: "_Structure", beside: _Same) -> "_Structure":
    """The same with other models beside."""
    assert isinstance(beside.value, Beside)
    others = tuple(_structure(_Same(each.tape), _Same(each.passes)) for each in beside.value.models)
    return _interned(structure, others, beside.value.structure)


class _Run:
    """All that an outline depends on but the rank: equal ones are one object."""


@lru_cache(maxsize=REMEMBERED)
def _run(structure: "_Structure", engine_fields: tuple[object, ...]) -> _Run:  # noqa: ARG001
    return _Run()


class _Structure:
    """What an outline depends on of a model: equal ones are one object."""


@lru_cache(maxsize=256)
def _interned(*key: object) -> _Structure:  # noqa: ARG001  (the key alone tells them apart)
    return _Structure()


def _tiled_loss(tape: Tape) -> object:
    """When gradients of a loss that runs in tiles come, and how the model is called for it."""
    loss = tape.kernels.loss
    if loss not in TILED_LOSSES:
        return None
    found = [each.tiles for each in tape.segments[-1].operations if each.tiles is not None]
    return loss, *(each.count > 1 for each in found)


def _outline_of(segment: Segment) -> tuple[object, ...]:
    return (
        segment.index,
        segment.name,
        segment.repeat,
        segment.num_copies,
        segment.input is not None and segment.input.requires_grad,
        segment.output is not None and segment.output.requires_grad,
        tuple(_outline_of_parameter(each) for each in segment.parameters),
    )


def _outline_of_parameter(parameter: Parameter) -> tuple[object, ...]:
    return (
        parameter.name,
        parameter.module,
        parameter.shape,
        parameter.gradient_numel,
        parameter.added_up,
        parameter.ranks,
        parameter.whole_numel,
        parameter.is_distributed,
        parameter.role,
        parameter.experts,
        parameter.dtype.num_bytes,
        parameter.requires_grad,
        parameter.unused,
        parameter.viewed,
        parameter.codes_bytes,
    )


def _order_of(each: BackwardPass) -> tuple[object, ...]:
    """In which order gradients come."""
    return (
        each.segment.index,
        each.repeats,
        tuple(
            (
                interval.parameter.name,
                interval.gradient is not None,
                interval.gradient_bytes,
            )
            for interval in each.intervals
            if interval.parameter is not None
        ),
    )
