"""CPU memory of one rank: the model while it is loaded, what is offloaded, checkpoints on their way.

Legend: W bytes of a weight, P elements of this rank's part (stage 3: of its shards), n elements of
the largest parameter. Page-locked blocks are powers of two (``memplan.memory.host``), which the
records of fake tensors, and so ``kernel_scratch=False``, do not count.
"""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.memory.account import HostMemory
from memplan.memory.deepspeed.job import MASTER_BYTES, Job
from memplan.memory.host import pinned_bytes
from memplan.training.choices import Offload


@dataclass(frozen=True, slots=True)
class PageLock:
    """How blocks are page-locked."""

    rounds: bool
    """Up to a power of two."""

    def bytes_of(self, num_bytes: int, *, pinned: bool = True) -> int:
        """A block of this size [bytes]."""
        return pinned_bytes(num_bytes) if pinned and self.rounds else num_bytes


def replicated_host(job: Job, *, part_numel: int, accumulated_bytes: int) -> HostMemory:
    """Stages 1 and 2 with the optimizer on the CPU (stage_1_and_2.py, ``__init__``).

    Master weights, fp32 gradients, the optimizer's states, a 16-bit staging copy of the part and a
    staging buffer of the largest parameter. While they are set up, page-locking keeps second copies
    of the staging buffer and of the gradients. ``accumulated_bytes``: what stage 2 keeps over
    micro-steps, page-locked parameter by parameter.
    """
    lock = PageLock(job.given.setup.kernel_scratch)
    pinned, width = job.options.pin_memory, job.weight_bytes
    master = lock.bytes_of(MASTER_BYTES * part_numel, pinned=pinned)
    staging = lock.bytes_of(width * part_numel, pinned=pinned)
    largest = lock.bytes_of(width * job.weights.largest_trained, pinned=pinned)
    ready = 2 * master + staging + largest
    copies = (MASTER_BYTES + width) * part_numel if pinned else 0
    states = job.state_bytes(part_numel)
    held = ready + states + accumulated_bytes
    return HostMemory(
        held_bytes=held,
        load_bytes=max(job.model_bytes, ready + copies),
        save_bytes=held + saved_bytes(job, part_numel=0),
        writer_bytes=writer_bytes(job, part_numel=0),
        pinned_bytes=ready + accumulated_bytes if pinned else 0,
    )


def sharded_host(job: Job, *, shards: Sequence[int], groups: Sequence[int]) -> HostMemory:
    """Stage 3 (stage3.py, ``_setup_for_real_optimizer``).

    ``shards``: elements of this rank's part of every parameter; ``groups``: of each sub-group of the
    trained ones. Without zero.Init every rank first builds the whole model in CPU memory; it has
    gone to the GPU before anything of the optimizer is made.
    """
    lock = PageLock(job.given.setup.kernel_scratch)
    weights = _offloaded_weights(job, lock, shards) if job.offloads_param else 0
    # Shards pass through the CPU when they are put together in one buffer, there or on the GPU.
    loading = weights + job.weight_bytes * sum(shards)
    if job.given.setup.offload_param is Offload.CPU:
        # There that buffer is page-locked through a copy while every shard still lies apart.
        loading += _apart(job, lock, shards)
    if not job.options.zero_init:
        loading = max(loading, job.model_bytes)
    if not job.offloads_optimizer:
        largest = max(groups, default=0)
        return HostMemory(
            held_bytes=weights,
            load_bytes=loading,
            save_bytes=weights + saved_bytes(job, part_numel=largest),
            writer_bytes=writer_bytes(job, part_numel=largest),
            pinned_bytes=weights,
        )
    if job.given.setup.offload_optimizer is Offload.NVME:
        held, peak, locked = _swapping(job, lock, groups)
    else:
        held, peak, locked = _optimizer(job, lock, groups)
    return HostMemory(
        held_bytes=weights + held,
        load_bytes=max(loading, weights + peak),
        save_bytes=weights + held + saved_bytes(job, part_numel=0),
        writer_bytes=writer_bytes(job, part_numel=0),
        pinned_bytes=weights + locked,
    )


def _apart(job: Job, lock: PageLock, shards: Sequence[int]) -> int:
    """Shards of the weights, each in memory of its own (partition_parameters.py,
    ``_partition_param``)."""
    pinned = job.options.param_pin_memory
    return sum(lock.bytes_of(job.weight_bytes * shard, pinned=pinned) for shard in shards)


def _optimizer(job: Job, lock: PageLock, groups: Sequence[int]) -> tuple[int, int, int]:
    """Held, peak while loading and page-locked of the held: master weights, gradients, states and 16-bit gradients.

    A zero-filled gradient of the largest group is there while the groups' own are made, each of
    them page-locked through a copy.
    """
    total, pinned = sum(groups), job.options.pin_memory
    master = MASTER_BYTES * total
    made = peak = 0
    for group in groups:
        block = MASTER_BYTES * group
        made += lock.bytes_of(block, pinned=pinned)
        copy = block if pinned else 0
        peak = max(peak, master + MASTER_BYTES * max(groups) + made + copy)
    accumulated = job.gradient_bytes * total
    locked = made + lock.bytes_of(accumulated, pinned=pinned)
    ready = master + locked
    peak = max(peak, ready + (accumulated if pinned else 0))
    return ready + job.state_bytes(total), peak, locked if pinned else 0


def _swapping(job: Job, lock: PageLock, groups: Sequence[int]) -> tuple[int, int, int]:
    """The same with NVMe: the swapper's buffers and the 16-bit gradients stay in memory
    (swap_tensor/optimizer_utils.py)."""
    largest = MASTER_BYTES * max(groups, default=0)
    buffers = job.options.optimizer_buffer_count * lock.bytes_of(largest)
    accumulated = lock.bytes_of(job.gradient_bytes * sum(groups), pinned=job.options.pin_memory)
    held = buffers + accumulated
    locked = held if job.options.pin_memory else buffers
    return held, max(held, buffers + 2 * largest), locked


def _offloaded_weights(job: Job, lock: PageLock, shards: Sequence[int]) -> int:
    """Shards of the weights in CPU memory, or with NVMe those that stay and the swapper's buffers
    (swap_tensor/partitioned_param_swapper.py)."""
    width, options = job.weight_bytes, job.options
    total = sum(shards)
    if job.given.setup.offload_param is not Offload.NVME:
        return lock.bytes_of(width * total)
    largest = max(shards, default=0)
    if largest > options.param_buffer_size:
        msg = (
            f"engine_options: offload_param.buffer_size is {options.param_buffer_size} elements, "
            f"and the largest shard has {largest}: DeepSpeed refuses to start; raise it"
        )
        raise SetupError(msg)
    kept = min(total, options.param_max_in_cpu)
    buffers = options.param_buffer_count * options.param_buffer_size
    return lock.bytes_of(width * kept) + lock.bytes_of(width * buffers)


def saved_bytes(job: Job, *, part_numel: int) -> int:
    """What saving a checkpoint adds: every rank copies one of its flat states at a time to the CPU,
    which is ``part_numel`` elements, and rank 0 the 16-bit model before."""
    writer = writer_bytes(job, part_numel=part_numel) if job.rank == 0 else 0
    return MASTER_BYTES * part_numel + writer


def writer_bytes(job: Job, *, part_numel: int) -> int:
    """How much more saving adds on rank 0 (engine.py, ``_save_checkpoint``): the 16-bit model, in
    stage 3 only where it is asked to gather it."""
    gathers = job.options.gather_16bit_weights_on_model_save
    writes = job.is_replicated or gathers
    return max(0, job.model_bytes - MASTER_BYTES * part_numel) if writes else 0
