"""The account of a rank: its engine's program, added up over the passes of its model.

What a program holds is outlined once for all batches of a structure (``memplan.memory.outline``), and laid
over each batch's own passes.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from memplan.fast_dataclass import dataclass, replace
from memplan.memory.account import (
    STEP_PHASES,
    ComponentKind,
    Entry,
    HostMemory,
    Phase,
    RankAccount,
    make_phase,
)
from memplan.memory.crowds import NOTHING, UNCROWDED, Sizes
from memplan.memory.ends import batch_of
from memplan.memory.engine_options import looks_for_overflow
from memplan.memory.likeness import (
    MICRO_BATCHES,
    REMEMBERED,
    Asked,
    Question,
    asked_of,
    unstopped_spots,
)
from memplan.memory.outline import Moment, Outline
from memplan.memory.programs import heaviest_ranks, program_of
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.rank import RankInput, check_rank
from memplan.memory.replaying.ledger import Part
from memplan.memory.spots import Spots, height_entries
from memplan.memory.tally import Tally
from memplan.training.splitting.exchange import Visit


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
    asked = asked_of(given)
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
    outlined = _outlined(Question(asked_of(given), rank))
    return tuple(outlined.outline.visits[1:])


def activations_peak_bytes(given: RankInput) -> int:
    """The most that the model's own tensors take in a step, weights and gradients left out [bytes].

    Of a pipeline, with one micro-batch in flight, where that is most.
    """
    return unstopped_spots(given).highest_bytes


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


def _weigh(asked: Asked, rank: int, capacity_bytes: int | None) -> _Weighed:
    sizes = UNCROWDED
    if asked.given.stages:
        from memplan.memory.programs.pipeline_ranks import sizes_of_rank  # only for pipelines

        sizes = sizes_of_rank(asked.given, rank)
    outlined = _outlined(Question(asked, rank))
    loaded = outlined.loaded
    if asked.goes_by_capacity and capacity_bytes is not None:
        loaded = _loaded(Question(asked, rank, capacity_bytes))
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
        num_batches * sum(batch_of(given.tape)),
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


def _program(question: "Question", given: RankInput, ledger: Tally) -> RankProgram:
    return program_of(
        given,
        ledger,
        workspace_bytes=0,
        rank=question.rank,
        capacity_bytes=question.capacity_bytes,
    )


@lru_cache(maxsize=REMEMBERED)
def _loaded(question: "Question") -> _Loaded:
    """Load as a rank does on a card without room for what loading takes elsewhere."""
    asked = question.asked
    # Which part of the flat buffer is a rank's makes no difference yet, but which stage is.
    rank = question.rank if asked.given.stages else 0
    outline = _load_outline(Question(asked, rank, question.capacity_bytes))
    given, spots = question.taken()
    program = _program(question, given, Tally(spots))
    return _Loaded(outline=outline, host=_with_average(program))


@lru_cache(maxsize=REMEMBERED)
def _load_outline(question: "Question") -> Outline:
    """Run a rank's program as far as it goes by the room of a card: what comes after loading does not."""
    given, spots = question.taken()
    ledger = Tally(spots)
    program = _program(question, given, ledger)
    program.start()
    return ledger.close(program.weight_words)


@lru_cache(maxsize=REMEMBERED)
def _outlined(question: "Question") -> _Outlined:
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


def _ranks(asked: Asked) -> Sequence[int]:
    """Which ranks are weighed for the fullest; in a pipeline that goes by what is in flight, too."""
    if asked.given.stages:
        return heaviest_ranks(asked.given)
    return _heaviest(Question(asked, 0))


@lru_cache(maxsize=REMEMBERED)
def _heaviest(question: "Question") -> tuple[int, ...]:
    """Which ranks are weighed for the fullest: the same for every batch."""
    given, _ = question.taken()
    return tuple(heaviest_ranks(given))
