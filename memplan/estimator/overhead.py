"""What lies beside the allocator's segments of a setup on a card."""

from memplan.hardware.gpu import GpuSpec
from memplan.memory.runtime import ByteRange, nccl_range, overhead_range
from memplan.training.choices import FsdpStrategy
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.context_parallel import ContextParallelKind


def overhead_of(setup: TrainingSetup, gpu: GpuSpec | None) -> ByteRange:
    """CUDA context and NCCL of one process; of a card that has another runtime, up to as much [bytes]."""
    found = overhead_range(
        gpu.compute_capability if gpu is not None else None,
        num_communicators=num_communicators(setup),
        num_all_to_all=num_all_to_all(setup),
    )
    if gpu is not None and not gpu.manager.is_replayed:
        return ByteRange(0, found.high)
    return found


def nccl_of(setup: TrainingSetup) -> ByteRange:
    """NCCL's buffers of one process alone [bytes]."""
    return nccl_range(num_communicators(setup), num_all_to_all=num_all_to_all(setup))


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


def num_all_to_all(setup: TrainingSetup) -> int:
    """Of these, over which each rank sends to each: tokens to experts, or heads of shared sequences."""
    shared = setup.sequences_shared
    by_heads = shared is not None and shared.kind is ContextParallelKind.ALL_TO_ALL
    return (setup.expert_parallel > 1) + by_heads
