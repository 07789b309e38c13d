"""What practitioners change first where a setup of Megatron's does not fit, the cheapest change first.

Sharding the optimizer's states and sharing out the residual stream cost next to nothing; then layers are computed
again, a few of each stage before all; then the model is split further, inside a node before over stages.
"""

from collections.abc import Iterator
from contextlib import suppress

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.model.spec import ModelSpec
from memplan.training.choices import Recomputation
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineSchedule
from memplan.training.splitting.stages import divide_layers

SHARES = (4, 2)
"""Of a stage's layers, one in so many is computed again before all are."""


def megatron_changes(model: ModelSpec, setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Changed setups on as many GPUs; those that cannot be are left out."""
    free = next(_possible(setup, _cheap(setup)), setup)
    if free != setup:
        yield free
    if setup.checkpointing is Recomputation.NONE and not _recomputes(setup):
        stages = setup.pipeline_parallel * setup.virtual_stages
        layers = max(1, model.num_layers // stages)
        for share in SHARES:
            count = layers // share
            if count:
                yield from _possible(free, {"checkpointing": CheckpointedLayers.first(count)})
    full = free
    if not _recomputes(setup):
        full = next(_possible(free, {"checkpointing": Recomputation.FULL}), free)
    yield full
    for base in (free, full):
        yield from _split_further(model, base)


def _cheap(setup: TrainingSetup) -> dict[str, object]:
    options = dict(setup.engine_options)
    changed: dict[str, object] = {}
    if setup.data_parallel * setup.context_parallel > 1:
        changed["engine_options"] = {**options, "use_distributed_optimizer": True}
    if setup.tensor_parallel > 1:
        changed["sequence_parallel"] = True
    return changed


def _recomputes(setup: TrainingSetup) -> bool:
    """Whether its engine options say what is computed again."""
    return "recompute_granularity" in dict(setup.engine_options)


def _split_further(model: ModelSpec, setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Layers over more ranks of a node, and over more stages; what splits least comes first, layers before stages.

    Of stages there are no more than micro-batches in a step: most of such a pipeline would idle.
    """
    tensors = _doublings(setup.tensor_parallel, setup.gpus_per_node)
    most_stages = min(model.num_layers, setup.num_gpus, setup.gradient_accumulation_steps)
    pipelines = _doublings(setup.pipeline_parallel, most_stages)
    both = sorted((tensor * stages, stages, tensor) for tensor in tensors for stages in pipelines)
    for _, stages, tensor in both[1:]:
        fields: dict[str, object] = {"tensor_parallel": tensor, "pipeline_parallel": stages}
        if tensor > 1:
            fields["sequence_parallel"] = True
        if stages > setup.pipeline_parallel:
            if setup.pipeline_schedule is None:
                fields["pipeline_schedule"] = PipelineSchedule.ONE_F_ONE_B
            num_stages = stages * setup.virtual_stages
            with suppress(SetupError):
                uneven = model.num_layers % num_stages > 0
                fields["layers_per_stage"] = (
                    divide_layers(model.num_layers, num_stages) if uneven else None
                )
        yield from _possible(setup, fields)


def _doublings(degree: int, most: int) -> list[int]:
    found = [degree]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def _possible(setup: TrainingSetup, fields: dict[str, object]) -> Iterator[TrainingSetup]:
    with suppress(SetupError):
        yield replace(setup, **fields)  # type: ignore[arg-type]
