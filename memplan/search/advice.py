"""The nearest change that makes a setup fit."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import ParamSpec

from memplan.errors import SetupError
from memplan.estimator import Estimate, Verdict, estimate, without_run
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.account import ComponentKind
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.spec import ModelSpec
from memplan.search.batch import largest_micro_batch, most_room
from memplan.search.splitting import split_further
from memplan.search.together import all_of
from memplan.training.choices import AllocatorKind, FsdpStrategy, Offload, Recomputation, ZeroStage
from memplan.training.precision import Engine, carried_precision
from memplan.training.setup import TrainingSetup
from memplan.training.setup_checks import MAX_GPUS
from memplan.upward import provided

WEIGHT_BYTES = 2
"""Of an element of a weight in 16 bit."""
LOADING_SHARE = 0.8
"""Of a GPU that the whole model may take while it is loaded, before zero.Init is called for."""
MAX_DOUBLINGS = 10
"""How often the number of GPUs is doubled in search of one that suffices."""


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
        return self.answer.total_bytes.low - self.better.total_bytes.low

    @property
    def text(self) -> str:
        """What to change, what that saves, and the options for it, in a line."""
        found: str = provided("advice_text", self)
        return found

    def to_dict(self) -> dict[str, object]:
        """One of the ``hints`` of ``--format json``."""
        found: dict[str, object] = provided("hint_row", self)
        return found


def hints_of(answer: Estimate) -> tuple[Advice, ...]:
    """What would make one estimate fit; nothing where it does."""
    return hints_for(answer.model, [[answer]], places=()).advice


def largest_batch_of(answer: Estimate) -> int | None:
    """The largest micro-batch with which its setup fits its GPU, 0 where none does; None: not known."""
    if answer.gpu is None or answer.unmodelled:
        return None
    return largest_micro_batch(answer.model, answer.setup, answer.gpu, known=answer)


def shortage(answer: Estimate) -> tuple[int, int]:
    """What a GPU lacks, then what a node lacks [bytes]: which of several comes nearest."""
    node = answer.node_memory_bytes
    return missing_bytes(answer), max(0, answer.host_bytes - node) if node is not None else 0


def missing_bytes(answer: Estimate) -> int:
    """How much the low end of the range exceeds the GPU by, or, where it is tight, the high end [bytes]."""
    if answer.gpu is None:
        return 0
    capacity, total = answer.gpu.capacity_bytes, answer.total_bytes
    return total.low - capacity if total.low > capacity else max(0, total.high - capacity)


UNSHARED = (
    ComponentKind.ACTIVATIONS, ComponentKind.LOGITS_AND_LOSS, ComponentKind.GATHERED_PARAMETERS,
)  # fmt: skip
"""What each GPU holds of its own, however many there are."""


def unshared_bytes(answer: Estimate) -> int:
    """What more GPUs would not share between them, of what is held at the fullest moment [bytes]."""
    entries = answer.account.peak.entries
    return sum(entry.num_bytes for entry in entries if entry.kind in UNSHARED)


def advise(model: ModelSpec, answer: Estimate, *, micro_batch: int | None = None) -> Advice:
    """The nearest change that makes a setup fit: the one that costs least speed.

    ``micro_batch`` is the largest that fits where it is known. A smaller micro-batch keeps the
    global batch by accumulating more. Where nothing fits for certain, what is tight is named.
    """
    gpu = answer.gpu
    if gpu is None:
        return Advice(answer=answer, better=None)
    tight = None
    changes = _nearest_changes(model, answer.setup, gpu, micro_batch)
    if most_room(answer, gpu.capacity_bytes) >= 0:
        # What it asks for fits: it is the allocator's segments that do not.
        changes = chain([replace(answer.setup, allocator=AllocatorKind.EXPANDABLE)], changes)
    if answer.num_params * WEIGHT_BYTES > LOADING_SHARE * gpu.capacity_bytes:
        changes = map(with_zero_init, changes)
    tried: set[TrainingSetup] = {answer.setup}
    too_large: set[TrainingSetup] = set()
    """On one GPU or one group of them, what does not fit however many there are."""
    for setup in changes:
        alone = replace(setup, num_gpus=setup.num_gpus // setup.data_parallel, num_nodes=None)
        if setup in tried or alone in too_large:
            continue
        tried.add(setup)
        try:
            better = estimate(model, setup, gpu)
        except SetupError:
            continue
        if unshared_bytes(better) > gpu.capacity_bytes:
            too_large.add(alone)
        better = replace(better, node_memory_bytes=answer.node_memory_bytes)
        if better.job_verdict in (Verdict.FITS, Verdict.STATES_FIT):
            return Advice(answer=answer, better=better)
        if better.job_verdict is Verdict.TIGHT and tight is None:
            tight = better
    return Advice(answer=answer, better=tight)


def _nearest_changes(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec, micro_batch: int | None
) -> Iterator[TrainingSetup]:
    """Changed setups, the cheapest change first; made one by one, as each costs an estimate or a replay.

    They end with every engine on ever more GPUs, so that where none fits, none does.
    """
    if setup.micro_batch_size > 1:
        if micro_batch is None:
            micro_batch = largest_micro_batch(model, setup, gpu, limit=setup.micro_batch_size)
        if micro_batch:
            yield from _possible(smaller_batch, setup, micro_batch)
    if setup.chosen_engine is Engine.MEGATRON:
        from memplan.search.megatron_advice import megatron_changes  # only for it

        yield from megatron_changes(model, setup)
    if setup.zero_stage is ZeroStage.PARAMETERS:
        yield setup  # for the sake of zero.Init, where loading asks for it
    shardings = list(_more_sharding(setup))
    same_engine = [each for each in shardings if each.engine is setup.engine]
    other_engine = [each for each in shardings if each.engine is not setup.engine]
    yield from same_engine
    if setup.checkpointing is not Recomputation.FULL:
        yield from _possible(replace, setup, checkpointing=Recomputation.FULL)
    single = next(_possible(smaller_batch, setup, 1), setup)
    least = next(_possible(replace, single, checkpointing=Recomputation.FULL), single)
    yield least
    yield from other_engine
    for each in shardings:
        yield from _possible(replace, each, checkpointing=Recomputation.FULL)
    yield from _more_sharding(least)
    split = (
        each for sharded in _possible(_sharded, least) for each in split_further(least, sharded)
    )
    if setup.nodes > 1:  # past one node that is what jobs do; within one, its host is near
        yield from split
    yield from _offloading(setup)
    yield from _offloading(least)
    if setup.num_gpus > 1:
        yield from split
    yield from _more_gpus(shardings[-1] if shardings else setup)
    *_, widest = (least, *_more_sharding(least))
    yield from _more_gpus(widest)
    yield from _every_engine(single)
    yield from _every_engine(least)
    for num_gpus in _doublings(setup.num_gpus):
        for wider in _possible(replace, least, num_gpus=num_gpus, num_nodes=None):
            yield from _fully_sharded(wider)


_Given = ParamSpec("_Given")


def _possible(
    make: Callable[_Given, TrainingSetup], *args: _Given.args, **kwargs: _Given.kwargs
) -> Iterator[TrainingSetup]:
    """What is made, or nothing where it cannot be."""
    with suppress(SetupError):
        yield make(*args, **kwargs)


def _every_engine(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """The setup under every engine that there is, in every way it shards and offloads."""
    yield from _possible(under_engine, setup, Engine.DDP)
    for stage in (ZeroStage.NONE, ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        for sharded in _possible(under_engine, setup, Engine.DEEPSPEED, zero_stage=stage):
            yield sharded
            if stage is not ZeroStage.NONE:
                yield from _possible(replace, sharded, offload_optimizer=Offload.CPU)
    yield from _fully_sharded(setup)
    full = FsdpStrategy.FULL_SHARD
    for sharded in _possible(under_engine, setup, Engine.FSDP1, fsdp_strategy=full):
        yield sharded
        yield from _all_offloaded(sharded)


def _fully_sharded(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Parameters, gradients and optimizer states over all GPUs: what more of them help most."""
    last = ZeroStage.PARAMETERS
    for third in _possible(under_engine, setup, Engine.DEEPSPEED, zero_stage=last):
        yield third
        yield from _possible(replace, third, offload_optimizer=Offload.CPU)
        yield from _all_offloaded(third)
    for sharded in _possible(_sharded, setup):
        yield sharded
        yield from _all_offloaded(sharded)


def _all_offloaded(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Optimizer and parameters in CPU RAM."""
    yield from _possible(replace, setup, offload_optimizer=Offload.CPU, offload_param=Offload.CPU)


def under_engine(
    setup: TrainingSetup,
    engine: Engine,
    *,
    zero_stage: ZeroStage | None = None,
    fsdp_strategy: FsdpStrategy | None = None,
) -> TrainingSetup:
    """The setup under an engine, nothing offloaded, in the nearest precision it has.

    The former engine's own options are left behind.
    """
    precision = setup.precision
    return replace(
        setup,
        engine=engine,
        zero_stage=zero_stage,
        fsdp_strategy=fsdp_strategy,
        precision=carried_precision(precision, engine) if precision is not None else None,
        offload_optimizer=Offload.NONE,
        offload_param=Offload.NONE,
        engine_options=setup.engine_options if engine is setup.chosen_engine else (),
    )


def smaller_batch(setup: TrainingSetup, size: int) -> TrainingSetup:
    """The setup with a smaller micro-batch, accumulating more where that keeps the global batch."""
    steps = setup.gradient_accumulation_steps
    if setup.micro_batch_size % size == 0:
        steps *= setup.micro_batch_size // size
    return replace(setup, micro_batch_size=size, gradient_accumulation_steps=steps)


def _more_sharding(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    if setup.data_parallel == 1:
        return
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
        for higher in range(stage + 1, ZeroStage.PARAMETERS + 1):
            yield from _possible(replace, setup, zero_stage=ZeroStage(higher))
    elif engine in (Engine.FSDP, Engine.FSDP1):
        if setup.fsdp_strategy is not FsdpStrategy.FULL_SHARD:
            yield from _possible(replace, setup, fsdp_strategy=FsdpStrategy.FULL_SHARD)
    elif engine is Engine.DDP:
        yield from _possible(_sharded, setup)


def with_zero_init(setup: TrainingSetup) -> TrainingSetup:
    """Stage 3 with the model built inside ``deepspeed.zero.Init``, as transformers does.

    So it is unless the setup says otherwise; other stages and engines do not have it.
    """
    if setup.zero_stage is not ZeroStage.PARAMETERS or loads_under_zero_init(setup):
        return setup
    return replace(setup, engine_options={**dict(setup.engine_options), "zero_init": True})


def _sharded(setup: TrainingSetup) -> TrainingSetup:
    """The same under FSDP2."""
    return under_engine(setup, Engine.FSDP, fsdp_strategy=FsdpStrategy.FULL_SHARD)


def _offloading(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
        if stage is not ZeroStage.NONE and setup.offload_optimizer is Offload.NONE:
            yield from _possible(replace, setup, offload_optimizer=Offload.CPU)
        if setup.data_parallel > 1 or stage is ZeroStage.PARAMETERS:
            for sharded in _possible(replace, setup, zero_stage=ZeroStage.PARAMETERS):
                yield from _possible(replace, sharded, offload_optimizer=Offload.CPU)
                yield from _all_offloaded(sharded)
    elif engine in (Engine.FSDP, Engine.FSDP1):
        yield from _all_offloaded(setup)
    elif engine is Engine.DDP:
        deepspeed, second = Engine.DEEPSPEED, ZeroStage.GRADIENTS
        for sharded in _possible(under_engine, setup, deepspeed, zero_stage=second):
            yield from _possible(replace, sharded, offload_optimizer=Offload.CPU)
        third = ZeroStage.PARAMETERS
        for sharded in _possible(under_engine, setup, deepspeed, zero_stage=third):
            yield from _all_offloaded(sharded)


def _more_gpus(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Twice as many GPUs, and so on: only sharding makes them help."""
    alone = setup.chosen_engine is Engine.DDP
    for wider in _possible(_sharded, setup) if alone else (setup,):
        for num_gpus in _doublings(setup.num_gpus):
            yield from _possible(replace, wider, num_gpus=num_gpus, num_nodes=None)


def _doublings(num_gpus: int) -> Iterator[int]:
    for doublings in range(1, MAX_DOUBLINGS + 1):
        if num_gpus << doublings > MAX_GPUS:
            return
        yield num_gpus << doublings


def hints_for(
    model: ModelSpec,
    rows: Sequence[Sequence[Estimate]],
    places: Collection[Place] | None = None,
) -> Hints:
    """The largest micro-batch of rows on their GPUs, and advice where nothing fits a GPU.

    ``places`` are the rows and GPUs to look at; None: all.
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
        min(column, key=shortage)
        for column in zip(*rows, strict=True)
        if all(each.job_verdict in (Verdict.OOM, Verdict.TIGHT) for each in column)
    ]
    known = list(asked.values())

    def work(number: int) -> int | Advice:
        if number < len(hopeless):
            return told(advise(model, hopeless[number]))
        answer, gpu = known[number - len(hopeless)]
        return largest_micro_batch(model, answer.setup, gpu, known=answer)

    gpus = [gpu for _, gpu in known]
    found = all_of(work, len(hopeless) + len(known), shared=[model, *hopeless, *gpus])
    sizes = [each for each in found if isinstance(each, int)]
    return Hints(
        largest=dict(zip(asked, sizes, strict=True)),
        advice=tuple(each for each in found if isinstance(each, Advice)),
    )


def told(advice: Advice) -> Advice:
    """What of an advice is told, without the runs behind it."""
    _ = advice.missing_bytes, advice.saved_bytes
    better = without_run(advice.better) if advice.better is not None else None
    return replace(advice, answer=without_run(advice.answer), better=better)
