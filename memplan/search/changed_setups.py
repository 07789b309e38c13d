"""Setups that are changed in one thing or another so that they need less, as a person would try it.

Each function makes the changed setups of one kind, what costs least first, and leaves out those that cannot be. In which order
kinds are tried is ``memplan.search.nearest_changes``'s to say.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ParamSpec

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import FsdpStrategy, Offload, Recomputation, ZeroStage
from memplan.training.choices_of_kernels.kernels import KernelPreset, LossKernel
from memplan.training.choices_of_kernels.liger import LIGER_MODELS
from memplan.training.precision import Engine, carried_precision
from memplan.training.setup import TrainingSetup
from memplan.training.setup_checks import MAX_GPUS

MAX_DOUBLINGS = 10
"""How often the number of GPUs is doubled in search of one that suffices."""
TRITON_COMPUTE_CAPABILITY = (7, 0)
"""The oldest CUDA device that Triton compiles for, in which these kernels are written (triton, README.md)."""

_Given = ParamSpec("_Given")


def possible(
    make: Callable[_Given, TrainingSetup], *args: _Given.args, **kwargs: _Given.kwargs
) -> Iterator[TrainingSetup]:
    """What is made, or nothing where it cannot be."""
    with suppress(SetupError):
        yield make(*args, **kwargs)


def recomputing(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Activations computed again instead of kept: some, where the setup's code base can, then all."""
    if setup.checkpointing is Recomputation.FULL:
        return
    if setup.kernels is not KernelPreset.HF and setup.checkpointing is Recomputation.NONE:
        yield from possible(replace, setup, checkpointing=Recomputation.SELECTIVE)
    yield from possible(replace, setup, checkpointing=Recomputation.FULL)


def lean_kernels(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec) -> Iterator[TrainingSetup]:
    """The kernels of the setup's own code base that never have all logits, where the card runs them.

    They take the output matrix and the hidden states: a model that is split has the two in pieces.
    """
    capability = gpu.compute_capability
    if setup.tensor_parallel * setup.pipeline_parallel > 1:
        return
    if capability is not None and capability < TRITON_COMPUTE_CAPABILITY:
        return
    if setup.kernels is KernelPreset.HF and setup.loss is None and model.family in LIGER_MODELS:
        yield from possible(replace, setup, kernels=KernelPreset.LIGER)
        yield from possible(replace, setup, loss=LossKernel.FUSED_LINEAR)
    if setup.kernels is KernelPreset.TORCHTITAN and setup.loss is None:
        yield from possible(replace, setup, loss=LossKernel.CHUNKED)


def smaller_batches(setup: TrainingSetup, largest: int) -> Iterator[TrainingSetup]:
    """The setup with smaller micro-batches, up to the largest that fits as many steps: first those that make up its batch.

    Under some engines more steps take memory of their own: then the batch gets smaller too.
    """
    sizes = [each for each in range(1, largest + 1) if setup.micro_batch_size % each == 0]
    for size in reversed(sizes):
        yield from possible(smaller_batch, setup, size)
    if largest and largest < setup.micro_batch_size:
        yield from possible(replace, setup, micro_batch_size=largest)


def smaller_batch(setup: TrainingSetup, size: int) -> TrainingSetup:
    """The setup with a smaller micro-batch, accumulating more where that keeps the global batch."""
    steps = setup.gradient_accumulation_steps
    if setup.micro_batch_size % size == 0:
        steps *= setup.micro_batch_size // size
    return replace(setup, micro_batch_size=size, gradient_accumulation_steps=steps)


def every_engine(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """The setup under every engine that there is, in every way it shards and offloads."""
    yield from possible(under_engine, setup, Engine.DDP)
    for stage in (ZeroStage.NONE, ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        for sharded in possible(under_engine, setup, Engine.DEEPSPEED, zero_stage=stage):
            yield sharded
            if stage is not ZeroStage.NONE:
                yield from possible(replace, sharded, offload_optimizer=Offload.CPU)
    yield from fully_sharded(setup)
    full = FsdpStrategy.FULL_SHARD
    for sharded in possible(under_engine, setup, Engine.FSDP1, fsdp_strategy=full):
        yield sharded
        yield from all_offloaded(sharded)


def fully_sharded(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Parameters, gradients and optimizer states over all GPUs: what more of them help most."""
    last = ZeroStage.PARAMETERS
    for third in possible(under_engine, setup, Engine.DEEPSPEED, zero_stage=last):
        yield third
        yield from possible(replace, third, offload_optimizer=Offload.CPU)
        yield from all_offloaded(third)
    for sharded in possible(under_fsdp, setup):
        yield sharded
        yield from all_offloaded(sharded)


def all_offloaded(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Optimizer and parameters in CPU RAM."""
    yield from possible(replace, setup, offload_optimizer=Offload.CPU, offload_param=Offload.CPU)


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


def more_sharding(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """More of the states spread over the ranks of data, under the setup's engine where that can."""
    if setup.data_parallel == 1:
        return
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
        for higher in range(stage + 1, ZeroStage.PARAMETERS + 1):
            yield from possible(replace, setup, zero_stage=ZeroStage(higher))
    elif engine in (Engine.FSDP, Engine.FSDP1):
        if setup.fsdp_strategy is not FsdpStrategy.FULL_SHARD:
            yield from possible(replace, setup, fsdp_strategy=FsdpStrategy.FULL_SHARD)
    elif engine is Engine.DDP:
        yield from possible(under_fsdp, setup)


def under_fsdp(setup: TrainingSetup) -> TrainingSetup:
    """The same under FSDP2."""
    return under_engine(setup, Engine.FSDP, fsdp_strategy=FsdpStrategy.FULL_SHARD)


def streamed_activations(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """What is kept for the backward pass waits in CPU RAM."""
    if not setup.offload_activations.sends:
        yield from possible(replace, setup, offload_activations=ActivationOffload.STREAMED)


def offloading(setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """Optimizer and parameters in CPU RAM, under an engine that can."""
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = ZeroStage.GRADIENTS if setup.zero_stage is None else setup.zero_stage
        if stage is not ZeroStage.NONE and setup.offload_optimizer is Offload.NONE:
            yield from possible(replace, setup, offload_optimizer=Offload.CPU)
        if setup.data_parallel > 1 or stage is ZeroStage.PARAMETERS:
            for sharded in possible(replace, setup, zero_stage=ZeroStage.PARAMETERS):
                yield from possible(replace, sharded, offload_optimizer=Offload.CPU)
                yield from all_offloaded(sharded)
    elif engine in (Engine.FSDP, Engine.FSDP1):
        yield from all_offloaded(setup)
    elif engine is Engine.DDP:
        deepspeed, second = Engine.DEEPSPEED, ZeroStage.GRADIENTS
        for sharded in possible(under_engine, setup, deepspeed, zero_stage=second):
            yield from possible(replace, sharded, offload_optimizer=Offload.CPU)
        third = ZeroStage.PARAMETERS
        for sharded in possible(under_engine, setup, deepspeed, zero_stage=third):
            yield from possible(replace, sharded, offload_optimizer=Offload.CPU)
            yield from all_offloaded(sharded)


def more_gpus(*setups: TrainingSetup) -> Iterator[TrainingSetup]:
    """Twice as many GPUs, and so on: only sharding makes them help.

    Of the same number the first of the setups comes first: GPUs are dearer than what the others give up.
    """
    sharded = [
        each
        for setup in setups
        for each in (possible(under_fsdp, setup) if setup.chosen_engine is Engine.DDP else (setup,))
    ]
    for num_gpus in doublings(setups[0].num_gpus):
        for each in sharded:
            yield from possible(replace, each, num_gpus=num_gpus, num_nodes=None)


def doublings(num_gpus: int) -> Iterator[int]:
    """Twice as many GPUs, four times, and so on."""
    for times in range(1, MAX_DOUBLINGS + 1):
        if num_gpus << times > MAX_GPUS:
            return
        yield num_gpus << times
