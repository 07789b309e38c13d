"""What lies beside the allocator's segments of a setup on a card."""

from memplan.hardware.gpu import GpuSpec
from memplan.memory.runtime import ByteRange, overhead_range
from memplan.training.choices import FsdpStrategy
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def overhead_of(setup: TrainingSetup, gpu: GpuSpec | None) -> ByteRange:
    """CUDA context and NCCL of one process [bytes]."""
    return overhead_range(
        gpu.compute_capability if gpu is not None else None,
        num_communicators=num_communicators(setup),
    )


def num_communicators(setup: TrainingSetup) -> int:
    """NCCL's communicators: one of several GPUs, and one more where shards are replicated, layers split, or
    sequences shared, too. DeepSpeed has one of a single GPU, over which it broadcasts the weights."""
    if setup.num_gpus == 1:
        return int(setup.chosen_engine is Engine.DEEPSPEED)
    splits_too = setup.tensor_parallel > 1 and setup.gradient_ranks > 1
    shares_too = setup.context_parallel > 1
    # Where experts are spread, those who have the same ones are a group too.
    spreads_too = 2 * (setup.expert_parallel > 1)
    return 1 + (setup.fsdp_strategy is FsdpStrategy.HYBRID) + splits_too + shares_too + spreads_too
