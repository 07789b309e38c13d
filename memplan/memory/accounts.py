"""The account of a rank: its engine's program, added up over the passes of its model.

What a program holds is outlined once for all batches of a structure (``memplan.memory.outline``), and laid
over each batch's own passes.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from operator import attrgetter

from memplan.fast_dataclass import dataclass, fields, replace
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.memory.account import (
    STEP_PHASES,
    ComponentKind,
    Entry,
    HostMemory,
    Phase,
    RankAccount,
    make_phase,
)
from memplan.memory.beside import ALONE, Beside
from memplan.memory.crowds import NOTHING, UNCROWDED, Sizes
from memplan.memory.engine_options import looks_for_overflow, reduces_each_micro_batch
from memplan.memory.outline import Moment, Outline
from memplan.memory.programs import (
    heaviest_ranks,
    holds_inputs,
    loads_by_capacity,
    program_of,
    stops_of,
)
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.rank import RankInput, check_rank
from memplan.memory.replaying.ledger import Part
from memplan.memory.spots import Spots, height_entries
from memplan.memory.step import BackwardPass, StepPasses
from memplan.memory.tally import Tally
from memplan.training.choices_of_kernels.kernels import TILED_LOSSES
from memplan.training.precision import PRECISIONS
from memplan.training.setup import PLAIN_OPTIMIZERS, TrainingSetup
from memplan.training.splitting.exchange import Visit

MICRO_BATCHES = 3
"""A step's first micro-batch, any one after it, and its last: no further one holds more."""
REMEMBERED = 1024
"""Outlines that are kept: more than a sweep meets between two of the same kind."""


def rank_account(
    given: RankInput, *, rank: int | None = None, capacity_bytes: int | None = None
) -> RankAccount:
    """What one rank holds, phase by phase [bytes]; of one that holds most where none is named.

    ``capacity_bytes`` is what an engine goes by that loads differently where there is no room.

    Raises ``SetupError`` for engine options that do not exist or cannot be, and for a rank that the
    setup does not have.
    """
    if rank is not None:
        check_rank(rank, given.setup.num_gpus)
    asked = _asked(given)
    first, *others = _ranks(asked) if rank is None else [rank]
    fullest = _weigh(asked, first, capacity_bytes)
    for each in others:
        found = _weigh(asked, each, capacity_bytes)
        if found.exceeds(fullest.most_bytes):
            fullest = found
    return _account(given, fullest)


def step_visits(given: RankInput, *, rank: int = 0) -> tuple[Visit, ...]:
    """What a rank exchanges in a steady step, pass after pass.

    Of more micro-batches than ``MICRO_BATCHES`` the first, one after it and the last are told.
    """
    outlined = _outlined(_Question(_asked(given), rank))
    return tuple(outlined.outline.visits[1:])


def activations_peak_bytes(given: RankInput) -> int:
    """The most that the model's own tensors take in a step, weights and gradients left out [bytes].

    Of a pipeline, with one micro-batch in flight, where that is most.
    """
    if given.stages:
        return _staged(given)[0].highest_bytes
    return _spots(_Same(given.passes), _Same(None), _Same(given.beside)).highest_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Asked:
    """A run of which any rank may be asked for."""

    given: RankInput
    spots: Spots
    run: "_Run"
    goes_by_capacity: bool


def _asked(given: RankInput) -> _Asked:
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
    return _Asked(
        given=given, spots=spots, run=run, goes_by_capacity=loads_by_capacity(given.setup)
    )


_STEP_PARTS = tuple(Part(name) for name in STEP_PHASES)
_WITH_OVERFLOW = (*_STEP_PARTS, Part.OVERFLOW)
_BETWEEN_STEPS = (Part.EVALUATION,)
"""Of a pipeline, whose ranks are not alike then: the last stage alone has logits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Weighed:
    """One rank's outline, laid over a batch."""

    rank: int
    outlined: "_Outlined"
    loaded: "_Loaded"
    spots: Spots
    sizes: Sizes
    """Of what is beside a pipeline's passes."""
    overflows: bool
    """A step looks for gradients that overflowed."""
    between_steps: tuple[Part, ...]
    """Parts of the run that decide beside its steps which rank is the fullest."""

    def exceeds(self, num_bytes: int) -> bool:
        """Whether a step holds more than that; sooner told than how much."""
        parts = (*(_WITH_OVERFLOW if self.overflows else _STEP_PARTS), *self.between_steps)
        outline = self.outlined.outline
        return bool(outline.moments(self.spots, parts, self.sizes, above=num_bytes))

    @property
    def most_bytes(self) -> int:
        """The most that it holds, by which ranks are told apart."""
        outline, spots, sizes = self.outlined.outline, self.spots, self.sizes
        between = outline.moments(spots, self.between_steps, sizes).values()
        return max(_step_peak(self), *map(_total, between), 0)

    @cached_property
    def moments(self) -> dict[Part, Moment]:
        """Of the parts of a step."""
        outline, spots, sizes = self.outlined.outline, self.spots, self.sizes
        found = outline.moments(spots, _STEP_PARTS, sizes)
        if self.overflows:
            overflow = outline.moments(spots, (Part.OVERFLOW,), sizes)
            found[Part.STEP] = max([*overflow.values(), found[Part.STEP]], key=_total)
        return found


def _weigh(asked: _Asked, rank: int, capacity_bytes: int | None) -> _Weighed:
    sizes = UNCROWDED
    if asked.given.stages:
        from memplan.memory.programs.pipeline_ranks import sizes_of_rank  # only for pipelines

        sizes = sizes_of_rank(asked.given, rank)
    outlined = _outlined(_Question(asked, rank))
    loaded = outlined.loaded
    if asked.goes_by_capacity and capacity_bytes is not None:
        loaded = _loaded(_Question(asked, rank, capacity_bytes))
    return _Weighed(
        rank=rank,
        outlined=outlined,
        loaded=loaded,
        spots=asked.spots,
        sizes=sizes,
        overflows=looks_for_overflow(asked.given.setup),
        between_steps=_BETWEEN_STEPS if asked.given.stages else (),
    )


def _total(moment: Moment) -> int:
    return moment.total_bytes


def _step_peak(found: _Weighed) -> int:
    """The fullest moment of a training step, but for the batch, which every rank has [bytes]."""
    return max(moment.total_bytes for moment in found.moments.values())


def _account(given: RankInput, found: _Weighed) -> RankAccount:
    pipeline = given.setup.pipeline
    num_batches = 1 if pipeline is None else pipeline.num_batches
    inputs = Entry(
        ComponentKind.INPUTS,
        num_batches * max(given.tape.inputs_bytes, ALLOCATION_ROUNDING),
        "token ids and labels",
    )
    outlined = found.outlined
    return RankAccount(
        rank=found.rank,
        phases=tuple(_phases(found, inputs)),
        held_bytes=outlined.outline.held_bytes(found.sizes) + inputs.num_bytes,
        host=_with_states(found.loaded.host, outlined.off_gpu_bytes + _away_bytes(given)),
        left_out=outlined.left_out,
        unsaved=outlined.unsaved,
    )


def _away_bytes(given: RankInput) -> int:
    """Activations that lie in CPU RAM [bytes]."""
    if not given.stages or not given.setup.offload_activations.sends:
        return 0 if given.stages else given.passes.away_bytes
    from memplan.memory.programs.chunk_offload import most_away_bytes  # only then

    return most_away_bytes(given)


def _phases(weighed: _Weighed, inputs: Entry) -> list[Phase]:
    found: list[Phase] = []
    steady = _step_peak(weighed)
    outline, spots, sizes = weighed.outlined.outline, weighed.spots, weighed.sizes
    loaded = weighed.loaded.outline
    for part, moment in loaded.moments(spots, (Part.LOAD,), sizes).items():
        found.append(make_phase(part.value, loaded.entries(moment.held)))
    begun = outline.moments(spots, (Part.FIRST_STEP,), sizes, above=steady)
    ended = outline.moments(spots, (Part.EVALUATION, Part.SAVE), sizes)
    for part, moment in {**begun, **weighed.moments, **ended}.items():
        crowd = () if moment.crowd is NOTHING else sizes.entries(moment.crowd)
        model = height_entries(spots.height(moment.spot, moment.repetition))
        entries = (*outline.entries(moment.held), *crowd, inputs, *model)
        found.append(make_phase(part.value, entries))
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Outlined:
    """What is the same for every batch."""

    outline: Outline
    loaded: "_Loaded"
    """On a card with room."""
    off_gpu_bytes: int
    """States of an optimizer that lie in CPU RAM."""
    left_out: tuple[str, ...]
    unsaved: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loaded:
    """How a rank loads, and what of CPU RAM goes by that."""

    outline: Outline
    host: HostMemory


def _program(question: "_Question", given: RankInput, ledger: Tally) -> RankProgram:
    return program_of(
        given,
        ledger,
        workspace_bytes=0,
        rank=question.rank,
        capacity_bytes=question.capacity_bytes,
    )


@lru_cache(maxsize=REMEMBERED)
def _loaded(question: "_Question") -> _Loaded:
    """Load as a rank does on a card without room for what loading takes elsewhere."""
    asked = question.asked
    # Which part of the flat buffer is a rank's makes no difference yet, but which stage is.
    rank = question.rank if asked.given.stages else 0
    outline = _load_outline(_Question(asked, rank, question.capacity_bytes))
    given, spots = question.taken()
    program = _program(question, given, Tally(spots))
    return _Loaded(outline=outline, host=_with_average(program))


@lru_cache(maxsize=REMEMBERED)
def _load_outline(question: "_Question") -> Outline:
    """Run a rank's program as far as it goes by the room of a card: what comes after loading does not."""
    given, spots = question.taken()
    ledger = Tally(spots)
    program = _program(question, given, ledger)
    program.start()
    return ledger.close(program.weight_words)


@lru_cache(maxsize=REMEMBERED)
def _outlined(question: "_Question") -> _Outlined:
    """Run a rank's program over a tally: loading, a steady step, a checkpoint."""
    given, spots = question.taken()
    ledger = Tally(spots)
    program = _program(question, given, ledger)
    num_micro_batches = min(given.setup.gradient_accumulation_steps, MICRO_BATCHES)
    program.start()
    program.settle(num_micro_batches=num_micro_batches)
    # What evaluation leaves gathered is there when a later step begins.
    program.evaluate(0)
    ledger.end_first_step()
    program.train(1, num_micro_batches=num_micro_batches)
    program.evaluate(1)
    ledger.enter(Part.SAVE)
    program.save()
    outline = ledger.close(program.weight_words)
    return _Outlined(
        outline=outline,
        loaded=_Loaded(outline=outline, host=_with_average(program)),
        off_gpu_bytes=program.off_gpu_bytes,
        left_out=program.left_out,
        unsaved=program.unsaved,
    )


def _with_average(program: RankProgram) -> HostMemory:
    """What a rank needs of CPU RAM, an average of its weights that lies there included."""
    host = program.host_memory()
    width = program.given.beside.averaged_host_bytes
    if not width:
        return host
    held = width * sum(program.kept_numel(parameter) for parameter, _ in program.weights)
    return replace(
        host,
        held_bytes=host.held_bytes + held,
        load_bytes=host.load_bytes + held,
        save_bytes=host.save_bytes + held,
    )


def _with_states(host: HostMemory, num_bytes: int) -> HostMemory:
    """With what else is in CPU RAM between steps: an optimizer's states, page-locked blocks that torch
    keeps for the next activations."""
    if not num_bytes:
        return host
    held, saved = host.held_bytes + num_bytes, host.save_bytes + num_bytes
    return replace(host, held_bytes=held, save_bytes=saved)


def _ranks(asked: _Asked) -> Sequence[int]:
    """Which ranks are weighed for the fullest; in a pipeline that goes by what is in flight, too."""
    if asked.given.stages:
        return heaviest_ranks(asked.given)
    return _heaviest(_Question(asked, 0))


@lru_cache(maxsize=REMEMBERED)
def _heaviest(question: "_Question") -> tuple[int, ...]:
    """Which ranks are weighed for the fullest: the same for every batch."""
    given, _ = question.taken()
    return tuple(heaviest_ranks(given))


class _Question:
    """A rank of a run, told apart by all that its outline depends on."""

    __slots__ = ("_asked", "capacity_bytes", "key", "rank")

    def __init__(self, asked: _Asked, rank: int, capacity_bytes: int | None = None) -> None:
        self._asked: _Asked | None = asked
        self.rank = rank
        self.capacity_bytes = capacity_bytes
        self.key = (asked.run, rank, self.capacity_bytes)

    @property
    def asked(self) -> _Asked:
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
        return isinstance(other, _Question) and other.key == self.key


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
    """What an optimizer's own reductions are split by, where it has any."""
    return None if given.setup.optimizer in PLAIN_OPTIMIZERS else given.reducing_device


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


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=256)
def _same_stage(tape: _Same, passes: _Same) -> tuple[object, ...]:
    assert isinstance(tape.value, Tape)
    return _structure(tape, passes), tape.value.options.stage


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=256)
def _structure(tape: _Same, passes: _Same) -> "_Structure":
    assert isinstance(tape.value, Tape)
    assert isinstance(passes.value, StepPasses)
    return _interned(
        tape.value.buffers_bytes,
        tape.value.buffers_in_use,
        tape.value.declared,
        _tiled_loss(tape.value),
        tuple(_outline_of(segment) for segment in tape.value.segments),
        tuple(each.repeats for each in passes.value.forward),
        tuple(_order_of(each) for each in passes.value.backward),
    )


@lru_cache(maxsize=256)
def _cut_structure(structure: "_Structure", spots: _Same, members: _Same) -> "_Structure":
    """The same where an engine takes part within segments: in which order it does what."""
    assert isinstance(spots.value, Spots)
    return _interned(structure, spots.value.acts, members.value)


@lru_cache(maxsize=256)
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
