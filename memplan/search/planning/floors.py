"""What a setup takes at least, by arithmetic: whether an estimate is worth its time.

Each figure is no more than what an estimate finds; what is not known to be held counts 0.
"""

from functools import lru_cache

from memplan.errors import SetupError
from memplan.memory.fsdp2.options import Fsdp2Options
from memplan.memory.megatron.options import MegatronStates
from memplan.search.planning.sizes import ModelSizes
from memplan.search.planning.speed import local_tokens
from memplan.training.choices import FsdpStrategy, Offload, ZeroStage
from memplan.training.jobs import PLAIN
from memplan.training.optimizers import Optimizer
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import PipelineRuntime, PipelineSchedule
from memplan.training.splitting.schedules import (
    MAX_ACTIVE_STAGES,
    Shape,
    most_in_flight,
    ordered_passes,
    rank_stages,
)
from memplan.training.splitting.stages import divide_layers


def states_floor(setup: TrainingSetup, sizes: ModelSizes) -> float:
    """Weights, gradients and optimizer states of one rank at their fullest; at least [bytes].

    Of adapters, quantized bases, other optimizers and jobs of several models nothing is known.
    """
    if not is_known(setup):
        return 0.0
    whole = sizes.local_params(setup)
    shard = sizes.num_params / setup.num_gpus
    weights, gradients, states = _bytes_each(setup)
    engine = setup.chosen_engine
    if engine is Engine.MEGATRON:
        own = MegatronStates.of(setup)
        buffer = own.main_gradients(PRECISIONS[setup.chosen_precision].weights).num_bytes
        if own.use_precision_aware_optimizer:
            states = own.exp_avg_dtype.num_bytes + own.exp_avg_sq_dtype.num_bytes
        spread = shard if own.use_distributed_optimizer else whole
        return (weights + buffer) * whole + states * spread
    if engine in (Engine.FSDP, Engine.FSDP1):
        if setup.fsdp_strategy is FsdpStrategy.NO_SHARD:
            return (weights + gradients + states) * whole
        return _fsdp_floor(setup, sizes, shard, whole)
    if engine is Engine.DDP:
        return (weights + gradients + states) * whole
    stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
    held = weights * (shard if stage is ZeroStage.PARAMETERS else whole)
    # Pipelines in bf16 spread states without ZeRO too (``BF16_Optimizer``).
    is_whole = stage is ZeroStage.NONE and setup.pipeline_parallel == 1
    held += states * (whole if is_whole else shard)
    return held


_FULL_ROUNDS = 3
"""Rounds of micro-batches after which each stage has had a backward pass, while as many are in flight as ever."""


def resident_floor(setup: TrainingSetup, sizes: ModelSizes) -> float:
    """What of it is there at any moment of a step, the fullest one of activations too; at least [bytes].

    Gradients come while activations go, but for those in buffers that stay.
    """
    if not is_known(setup):
        return 0.0
    weights, gradients, states = _bytes_each(setup)
    whole = sizes.local_params(setup)
    # Under a pipeline gradients stay whole from one micro-batch to the next.
    waits = setup.pipeline_parallel > 1 and (
        setup.gradient_accumulation_steps >= _FULL_ROUNDS * setup.pipeline_parallel
    )
    if setup.chosen_engine is Engine.DDP:
        return (weights + gradients * waits + states) * whole
    if setup.chosen_engine in (Engine.FSDP, Engine.FSDP1):
        if setup.fsdp_strategy is FsdpStrategy.NO_SHARD:
            return (weights + states) * whole
        width = PRECISIONS[setup.chosen_precision].compute.num_bytes
        copies = 0.0
        if setup.pipeline_parallel > 1:
            copies = 1 + _gathered_share(setup)
        elif setup.fsdp_strategy is FsdpStrategy.SHARD_GRAD_OP:
            copies = 1
        return (weights + states) * sizes.num_params / setup.num_gpus + copies * width * whole
    return states_floor(setup, sizes)


def waiting_floor(setup: TrainingSetup, sizes: ModelSizes) -> float:
    """What else is there from one micro-batch of a step to the next; at least [bytes].

    torch's pipelines have a buffer for each micro-batch that a stage receives, and for each gradient
    (torch 2.13, torch/distributed/pipelining/stage.py, ``_prepare_forward_infra``); without a reduction in each
    micro-batch FSDP2's gradients stay whole, in the format that they are reduced in.
    """
    found = 0.0
    pipeline = setup.pipeline
    steps = setup.gradient_accumulation_steps
    if pipeline is not None and pipeline.runtime is PipelineRuntime.TORCH:
        received = 2 * local_tokens(setup) * sizes.hidden_size / setup.tensor_parallel
        found += (2 * pipeline.num_virtual - 1) * steps * received
    if setup.chosen_engine is Engine.FSDP and is_known(setup):
        options = Fsdp2Options.of(setup)
        compute = PRECISIONS[setup.chosen_precision].compute
        width = (options.reduce_dtype or compute).num_bytes
        if pipeline is None and steps > 1 and not options.sync_each_batch:
            found += width * sizes.local_params(setup)
        elif pipeline is not None and steps >= _FULL_ROUNDS * pipeline.degree:
            found += max(0, width - compute.num_bytes) * sizes.local_params(setup)
    return found


def _fsdp_floor(setup: TrainingSetup, sizes: ModelSizes, shard: float, whole: float) -> float:
    """Shards, and beside them what is gathered: a layer with its gradients at the end of its backward pass.

    Under a pipeline what a rank works on stays gathered, and all gradients whole, between micro-batches (torchtitan:
    ``fsdp_reshard_after_forward`` "default"); without resharding all weights are.
    """
    weights, gradients, states = _bytes_each(setup)
    width = PRECISIONS[setup.chosen_precision].compute.num_bytes
    kept = (weights + states) * shard
    if setup.pipeline_parallel > 1:
        copies = 1 + _gathered_share(setup)
        return max(kept + gradients * shard, kept + copies * width * whole)
    if setup.fsdp_strategy is FsdpStrategy.SHARD_GRAD_OP:
        return max(kept + gradients * shard, kept + width * whole)
    return kept + max(gradients * shard, 2 * width * sizes.local_layer(setup))


def _gathered_share(setup: TrainingSetup) -> float:
    """Of a rank's weights those that a pipeline keeps gathered: of its stages three at a time; at least."""
    return min(MAX_ACTIVE_STAGES, setup.virtual_stages) / setup.virtual_stages


def is_known(setup: TrainingSetup) -> bool:
    """Whether all of a model is trained with AdamW, and nothing else: what floors know the states of."""
    plain = setup.adapter is None and setup.quantize is None and setup.job == PLAIN
    adam = setup.optimizer in (Optimizer.ADAMW_FUSED, Optimizer.ADAMW_FOREACH)
    return plain and adam and not setup.freeze.any and not setup.optimizer_in_backward


def _bytes_each(setup: TrainingSetup) -> tuple[int, int, int]:
    """Of a parameter: its weight, its gradient, AdamW's states and the master weight."""
    formats = PRECISIONS[setup.chosen_precision]
    weights, gradients = formats.weights.num_bytes, formats.gradients.num_bytes
    states = 2 * formats.optimizer_states.num_bytes + 4 * formats.master_weights
    if setup.offload_param is not Offload.NONE:
        weights = gradients = 0
    if setup.offload_optimizer is not Offload.NONE:
        states = gradients = 0
    return weights, gradients, states


def activations_floor(setup: TrainingSetup, sizes: ModelSizes) -> float:
    """What layers hand on between them, of the micro-batches in flight on the first stage; at least [bytes].

    Equation: ``2 * tokens * h * layers``, the input of each layer in 16 bits, which full recomputation
    keeps (Korthikanti et al., arXiv:2205.05198, section 5), in ``min(p, m)`` micro-batches.
    """
    if setup.offload_activations.sends:
        return 0.0
    split = setup.tensor_parallel
    inputs = 2 * local_tokens(setup) * sizes.hidden_size / split
    return inputs * sizes.num_layers * in_flight_share(setup, sizes.num_layers)


def in_flight_share(setup: TrainingSetup, num_layers: int) -> float:
    """What the fullest rank of a pipeline has in flight, in micro-batches of the whole model's layers; at least.

    Equation: ``max(n * l / L)`` over the ranks, with the ``n`` micro-batches of one stage that a rank has in
    flight by its schedule and the fewest layers ``l`` of one of its stages. Of schedules that torch does
    not run so, ``min(p - 1, m) / p``.

    >>> from memplan.training.setup import TrainingSetup
    >>> setup = TrainingSetup(num_gpus=4, pipeline_parallel=4, gradient_accumulation_steps=8)
    >>> in_flight_share(setup, 32)
    1.0
    """
    pipeline = setup.pipeline
    if pipeline is None:
        return 1.0
    stages, steps = pipeline.degree, pipeline.num_micro_batches
    is_known = pipeline.schedule in _OF_ROUNDS and pipeline.runtime is not PipelineRuntime.DEEPSPEED
    if not is_known:
        return min(stages - 1, steps) / stages
    # Further rounds of micro-batches are like the second one.
    rounds = max(1, steps // stages)
    return _share(
        pipeline.schedule, stages, pipeline.num_virtual, min(rounds, 2) * (steps // rounds),
        num_layers, setup.layers_per_stage,
    )  # fmt: skip


_OF_ROUNDS = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_ONE_F_ONE_B)


@lru_cache(maxsize=256)
def _share(
    schedule: PipelineSchedule,
    num_ranks: int,
    num_virtual: int,
    num_micro_batches: int,
    num_layers: int,
    explicit: tuple[int, ...] | None,
) -> float:
    try:
        counts = divide_layers(num_layers, num_ranks * num_virtual, explicit=explicit)
    except SetupError:
        return 0.0  # an estimate says why
    most = 0
    for rank in range(num_ranks):
        stages = rank_stages(schedule, num_ranks=num_ranks, num_virtual=num_virtual, rank=rank)
        passes = ordered_passes(schedule, Shape(num_ranks, num_virtual, num_micro_batches, rank))
        layers = min(counts[stage] for stage in stages)
        most = max(most, most_in_flight(passes).until_weight * layers)
    return most / num_layers
