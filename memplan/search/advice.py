"""The nearest change that makes a setup fit."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain

from memplan.errors import SetupError
from memplan.estimator import (
    Estimate,
    Verdict,
    bare_estimate,
    is_long_to_tell,
    least_bytes,
    told,
    without_run,
)
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.account import ComponentKind
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.spec import ModelSpec
from memplan.search.batch import largest_micro_batch, most_room
from memplan.search.changed_setups import (
    doublings,
    every_engine,
    fully_sharded,
    lean_kernels,
    more_gpus,
    more_sharding,
    offloading,
    possible,
    recomputing,
    smaller_batch,
    smaller_batches,
    streamed_activations,
    under_fsdp,
)
from memplan.search.in_parallel.together import all_of
from memplan.search.node_ram import overfills_usual_node
from memplan.search.planning.concessions import Concession, conceded, order_of
from memplan.search.splitting import split_further
from memplan.training.choices import AllocatorKind, Recomputation, ZeroStage
from memplan.training.coercion import coerce_enum
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.upward import provided

WEIGHT_BYTES = 2
"""Of an element of a weight in 16 bit."""
LOADING_SHARE = 0.8
"""Of a GPU that the whole model may take while it is loaded, before zero.Init is called for."""

FEW_TOKENS = 64
"""Of a sequence, where the length makes no difference."""

FITTING = (Verdict.FITS, Verdict.STATES_FIT)
"""What a change that helps comes to."""

Place = tuple[int, str]
"""A row's number and a GPU's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What stands beside estimates: how far one could go, and what would help."""

    largest: dict[Place, int]
    """The largest micro-batch that fits, for each row and GPU; 0: none."""
    advice: tuple["Advice", ...]
    """For each GPU on which no setup fits for certain, what would make the nearest one fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to change in a setup that does not fit."""

    answer: Estimate
    """Of the setup that does not fit."""
    better: Estimate | None
    """Of the nearest setup that fits; None where none was found."""

    @property
    def missing_bytes(self) -> int:
        """How much it lacks [bytes]."""
        return missing_bytes(self.answer)

    @property
    def saved_bytes(self) -> int:
        """What the change saves, at the low end of the range [bytes]."""
        if self.better is None:
            return 0
        return self.answer.least_total_bytes - self.better.least_total_bytes

    @property
    def text(self) -> str:
        """What to change, what that saves, and the options for it, in a line."""
        found: str = provided("advice_text", self)
        return found

    def to_dict(self) -> dict[str, object]:
        """One of the ``hints`` of ``--format json``."""
        found: dict[str, object] = provided("hint_row", self)
        return found


def hints_of(answer: Estimate, allow: str | Sequence[str]) -> tuple[Advice, ...]:
    """What would make one estimate fit; nothing where it does. Raises ``SetupError`` for an unknown word."""
    words = allow.split(",") if isinstance(allow, str) else allow
    allowed = [coerce_enum("allow", each, Concession) for each in words if each]
    return hints_for(answer.model, [[answer]], places=(), allow=allowed).advice


def largest_batch_of(answer: Estimate) -> int | None:
    """The largest micro-batch with which its setup fits its GPU, 0 where none does; None: not known."""
    if answer.gpu is None or answer.unmodelled:
        return None
    return largest_micro_batch(answer.model, answer.setup, answer.gpu, known=answer)


def shortage(answer: Estimate) -> tuple[int, int]:
    """What a GPU lacks, then what a node lacks [bytes]: which of several comes nearest."""
    node = answer.node_memory_bytes
    return missing_bytes(answer), max(0, answer.host_bytes - node) if node is not None else 0


def nearest(answers: Sequence[Estimate]) -> int:
    """The place of the one that lacks least, of equals the first.

    What one allocates alone may be more than another lacks: then its run is not replayed.
    """
    order = sorted((_least_shortage(each), number) for number, each in enumerate(answers))
    best: tuple[tuple[int, int], int] | None = None
    for least in order:
        if best is not None and least > best:
            break
        found = shortage(answers[least[1]]), least[1]
        best = found if best is None else min(best, found)
    assert best is not None, "there is one"
    return best[1]


def _least_shortage(answer: Estimate) -> tuple[int, int]:
    """What ``shortage`` is at least."""
    if answer.gpu is None:
        return shortage(answer)
    least = answer.worst_bytes + answer.overhead_bytes.low - answer.gpu.capacity_bytes
    return max(0, least), 0


def missing_bytes(answer: Estimate) -> int:
    """How much the low end of the range exceeds the GPU by, or, where it is tight, the high end [bytes]."""
    if answer.gpu is None:
        return 0
    beyond = answer.least_total_bytes - answer.gpu.capacity_bytes
    return beyond if beyond > 0 else max(0, answer.total_bytes.high - answer.gpu.capacity_bytes)


UNSHARED = (
    ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS, ComponentKind.GATHERED_PARAMETERS,
)  # fmt: skip
"""What each GPU holds of its own, however many there are."""


def unshared_bytes(answer: Estimate) -> int:
    """What more GPUs would not share between them, of what is held at the fullest moment [bytes]."""
    entries = answer.account.peak.entries
    return sum(entry.num_bytes for entry in entries if entry.kind in UNSHARED)


def advise(
    model: ModelSpec,
    answer: Estimate,
    *,
    micro_batch: int | None = None,
    allow: Sequence[Concession] = (),
) -> Advice:
    """The nearest change that makes a setup fit: the one that costs least speed.

    ``allow`` is what may be given up beside it, the least first.

    ``micro_batch`` is the largest that fits where it is known. A smaller micro-batch keeps the
    global batch by accumulating more. What is offloaded has to have room in a usual node of the card where nobody says
    how much CPU RAM there is; where nothing else fits, what needs more is named, and last what is tight.
    """
    gpu = answer.gpu
    if gpu is None:
        return Advice(answer=answer, better=None)
    search = _Search(model, answer, gpu)
    changes = _nearest_changes(model, answer, gpu, micro_batch, allow)
    if most_room(answer, gpu.capacity_bytes) >= 0:
        # What it asks for fits: it is the allocator's segments that do not.
        changes = chain([replace(answer.setup, allocator=AllocatorKind.EXPANDABLE)], changes)
    if answer.num_params * WEIGHT_BYTES > LOADING_SHARE * gpu.capacity_bytes:
        changes = map(with_zero_init, changes)
    for setup in changes:
        if search.fits(setup):
            return Advice(answer=answer, better=search.found)
    return Advice(answer=answer, better=search.next_best)


class _Search:
    """Looks at changed setups one after another, and remembers the best of those that do not do."""

    def __init__(self, model: ModelSpec, answer: Estimate, gpu: GpuSpec) -> None:
        self.model = model
        self.answer = answer
        self.gpu = gpu
        self.lacks_states = not _holds_states(answer, gpu) and is_long_to_tell(answer)
        """What lies on the card between steps decides, so that it is looked at first where that is sooner told."""
        self.found: Estimate | None = None
        self.tried: set[TrainingSetup] = {answer.setup}
        self.too_large: set[TrainingSetup] = set()
        """On one GPU or one group of them, what does not fit however many there are."""
        self.attainable: set[TrainingSetup] = set()
        """The same of what the most GPUs that are tried are not too few for."""
        self.overfilling: list[Estimate] = []
        """Need more CPU RAM than is usual: whether one fits the card is asked only where nothing else does."""
        self.tight: Estimate | None = None

    @property
    def next_best(self) -> Estimate | None:
        """Where none does."""
        fitting = (each for each in self.overfilling if each.job_verdict in FITTING)
        return next(fitting, self.tight)

    def fits(self, setup: TrainingSetup) -> bool:
        """Whether a setup that was not tried yet fits card and node; then it is what is found."""
        alone = replace(setup, num_gpus=setup.num_gpus // setup.data_parallel, num_nodes=None)
        if setup in self.tried or alone in self.too_large:
            return False
        self.tried.add(setup)
        try:
            if self.lacks_states and not self._may_hold_states(setup, alone):
                return False
            if self._is_hopeless(setup):
                self.too_large.add(alone)
                return False
            better = bare_estimate(self.model, setup, self.gpu)
        except SetupError:
            return False
        is_beyond = unshared_bytes(better) > self.gpu.capacity_bytes
        if is_beyond or (alone not in self.attainable and self._stays_too_large(better, alone)):
            self.too_large.add(alone)
        better = replace(better, node_memory_bytes=self.answer.node_memory_bytes)
        if better.node_memory_bytes is None and overfills_usual_node(better):
            self.overfilling.append(told(better, setup))
            return False
        verdict = better.job_verdict
        if verdict in FITTING:
            self.found = told(better, setup)
        elif verdict is Verdict.TIGHT and not overfills_usual_node(better):
            self.tight = self.tight or told(better, setup)
        return verdict in FITTING

    def _stays_too_large(self, answer: Estimate, alone: TrainingSetup) -> bool:
        """Whether what more GPUs than asked for are not enough for is too large for the most that are tried, too.

        All in between are then left out: those fail by the same run at either end. What is allocated alone says as
        much of each, and sooner: only where a run had to be replayed the most are asked, and it counts only where theirs
        had to be, too (of a dimension that is shorter than they are many each holds a row).
        """
        asked, tried = self.answer.setup.num_gpus, answer.setup.num_gpus
        *_, most = (tried, *doublings(asked))
        if not asked < tried < most or not self._lacks_by_replay(answer):
            return False
        with suppress(SetupError):
            setup = replace(answer.setup, num_gpus=most, num_nodes=None)
            if self._lacks_by_replay(bare_estimate(self.model, setup, self.gpu)):
                return True
        self.attainable.add(alone)
        return False

    def _lacks_by_replay(self, answer: Estimate) -> bool:
        """Whether the card is too small for its run, and not for what is allocated at once."""
        allocated = answer.worst_bytes + answer.overhead_bytes.low
        return allocated <= self.gpu.capacity_bytes and answer.verdict is Verdict.OOM

    def _may_hold_states(self, setup: TrainingSetup, alone: TrainingSetup) -> bool:
        """Whether the card has room for what is loaded and for states, which a step of few tokens says as well.

        What is too much while it is loaded with the most GPUs that are tried, too, is so with all in between: no
        shard gets larger with more of them.
        """
        short = self._shortened(setup)
        if short is None or short.account.unsaved:
            return True
        asked, tried = self.answer.setup.num_gpus, setup.num_gpus
        if self._loads(short):
            return _holds_states(short, self.gpu)
        *_, most = (tried, *doublings(asked))
        if asked < tried < most:
            for wider in possible(replace, setup, num_gpus=most, num_nodes=None):
                furthest = self._shortened(wider)
                if furthest is not None and not self._loads(furthest):
                    self.too_large.add(alone)
        return False

    def _shortened(self, setup: TrainingSetup) -> Estimate | None:
        """The same with one sequence of few tokens; None where that cannot be."""
        length = min(setup.seq_len or FEW_TOKENS, FEW_TOKENS * setup.context_parallel)
        with suppress(SetupError):
            short = replace(setup, micro_batch_size=1, seq_len=length, evaluation=None)
            return bare_estimate(self.model, short, self.gpu)
        return None

    def _loads(self, answer: Estimate) -> bool:
        """Whether the card has room for loading; of one whose allocator is not replayed that is not asked."""
        loading = answer.phases.get("load")
        if loading is None or answer.certain_bytes is not None:
            return True
        return loading.peak_bytes + answer.overhead_bytes.low <= self.gpu.capacity_bytes

    def _is_hopeless(self, setup: TrainingSetup) -> bool:
        """Whether activations alone are more than the card has, which a walk says long before an estimate."""
        if setup.pipeline_parallel > 1:
            return False
        return least_bytes(self.model, setup, self.gpu) > self.gpu.capacity_bytes


def _nearest_changes(
    model: ModelSpec,
    answer: Estimate,
    gpu: GpuSpec,
    micro_batch: int | None,
    allow: Sequence[Concession],
) -> Iterator[TrainingSetup]:
    """Changed setups, the cheapest change first; made one by one, as each costs an estimate or a replay.

    They end with every engine on ever more GPUs, so that where none fits, none does.
    """
    setup = answer.setup
    has_room = _holds_states(answer, gpu)
    if has_room:
        yield from _smaller_steps(model, setup, gpu, micro_batch)
    if setup.chosen_engine is Engine.MEGATRON:
        from memplan.search.megatron_advice import megatron_changes  # only for it

        yield from megatron_changes(model, setup)
    if setup.zero_stage is ZeroStage.PARAMETERS:
        yield setup  # for the sake of zero.Init, where loading asks for it
    shardings = list(more_sharding(setup))
    same_engine = [each for each in shardings if each.engine is setup.engine]
    other_engine = [each for each in shardings if each.engine is not setup.engine]
    yield from same_engine
    single = next(possible(smaller_batch, setup, 1), setup)
    least = next(possible(replace, single, checkpointing=Recomputation.FULL), single)
    if has_room:
        yield from recomputing(setup)
        yield least
    yield from other_engine
    for each in shardings:
        yield from possible(replace, each, checkpointing=Recomputation.FULL)
    yield from more_sharding(least)
    if has_room:
        yield from streamed_activations(setup)
    for given_up in sorted(allow, key=order_of):
        for base in (setup, least):
            yield from possible(conceded, base, given_up)
    yield from _furthest_changes(model, setup, single, least, gpu)


def _smaller_steps(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec, micro_batch: int | None
) -> Iterator[TrainingSetup]:
    """The same engine and states: leaner kernels, then fewer sequences at once."""
    yield from lean_kernels(model, setup, gpu)
    if setup.micro_batch_size > 1:
        if micro_batch is None:
            micro_batch = largest_micro_batch(model, setup, gpu, limit=setup.micro_batch_size)
        yield from smaller_batches(setup, micro_batch)


def _furthest_changes(
    model: ModelSpec,
    setup: TrainingSetup,
    single: TrainingSetup,
    least: TrainingSetup,
    gpu: GpuSpec,
) -> Iterator[TrainingSetup]:
    """Splits, offloading and more GPUs; ``single`` has the smallest micro-batch, ``least`` is checkpointed too."""
    split = (
        each for sharded in possible(under_fsdp, least) for each in split_further(least, sharded)
    )
    if setup.nodes > 1:  # past one node that is what jobs do; within one, its host is near
        yield from split
    yield from offloading(setup)
    yield from offloading(least)
    if setup.num_gpus > 1:
        yield from split
    *_, sharded_most = (setup, *more_sharding(setup))
    *_, widest = (least, *more_sharding(least))
    yield from more_gpus(setup, sharded_most, widest)
    yield from every_engine(setup)
    yield from every_engine(single)
    yield from every_engine(least)
    for lean in lean_kernels(model, least, gpu):
        yield from offloading(lean)
    for num_gpus in doublings(setup.num_gpus):
        for wider in possible(replace, least, num_gpus=num_gpus, num_nodes=None):
            yield from fully_sharded(wider)


def _holds_states(answer: Estimate, gpu: GpuSpec) -> bool:
    """Whether the card has room for what lies on it between steps, which only other states change."""
    kept = 0 if answer.setup.outputs_held else answer.held_bytes
    return kept + answer.overhead_bytes.low <= gpu.capacity_bytes


def with_zero_init(setup: TrainingSetup) -> TrainingSetup:
    """Stage 3 with the model built inside ``deepspeed.zero.Init``, as transformers does.

    So it is unless the setup says otherwise; other stages and engines do not have it.
    """
    if setup.zero_stage is not ZeroStage.PARAMETERS or loads_under_zero_init(setup):
        return setup
    return replace(setup, engine_options={**dict(setup.engine_options), "zero_init": True})


def hints_for(
    model: ModelSpec,
    rows: Sequence[Sequence[Estimate]],
    places: Collection[Place] | None = None,
    *,
    allow: Sequence[Concession] = (),
) -> Hints:
    """The largest micro-batch of rows on their GPUs, and advice where nothing fits a GPU.

    ``places`` are the rows and GPUs to look at; None: all. ``allow`` is what advice may give up.
    """
    asked: dict[Place, tuple[Estimate, GpuSpec]] = {}
    for number, row in enumerate(rows):
        for each in row:
            if each.gpu is None or each.unmodelled:
                continue
            place = (number, each.gpu.gpu_id)
            if places is None or place in places:
                asked[place] = each, each.gpu
    hopeless = [
        column[nearest(column)]
        for column in zip(*rows, strict=True)
        if all(each.job_verdict in (Verdict.OOM, Verdict.TIGHT) for each in column)
    ]
    known = list(asked.values())

    def work(number: int) -> int | Advice:
        if number < len(hopeless):
            return handed_over(advise(model, hopeless[number], allow=allow))
        answer, gpu = known[number - len(hopeless)]
        return largest_micro_batch(model, answer.setup, gpu, known=answer)

    gpus = [gpu for _, gpu in known]
    found = all_of(work, len(hopeless) + len(known), shared=[model, *hopeless, *gpus])
    sizes = [each for each in found if isinstance(each, int)]
    return Hints(
        largest=dict(zip(asked, sizes, strict=True)),
        advice=tuple(each for each in found if isinstance(each, Advice)),
    )


def handed_over(advice: Advice) -> Advice:
    """What of an advice is told, without the runs behind it."""
    _ = advice.missing_bytes, advice.saved_bytes
    better = without_run(advice.better) if advice.better is not None else None
    return replace(advice, answer=without_run(advice.answer), better=better)
