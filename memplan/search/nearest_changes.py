"""In which order changes are tried: what costs least speed first."""

from collections.abc import Iterator, Sequence

from memplan.estimator import Estimate
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.spec import ModelSpec
from memplan.search.batch import largest_micro_batch
from memplan.search.change_search import holds_states
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
from memplan.search.planning.concessions import Concession, conceded, order_of
from memplan.search.splitting import split_further
from memplan.training.choices import Recomputation, ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def nearest_changes(
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
    has_room = holds_states(answer, gpu)
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


def with_zero_init(setup: TrainingSetup) -> TrainingSetup:
    """Stage 3 with the model built inside ``deepspeed.zero.Init``, as transformers does.

    So it is unless the setup says otherwise; other stages and engines do not have it.
    """
    if setup.zero_stage is not ZeroStage.PARAMETERS or loads_under_zero_init(setup):
        return setup
    return replace(setup, engine_options={**dict(setup.engine_options), "zero_init": True})
