"""The processes of a job: those that torchrun started, or one that stands for a rank of several."""

import os
from typing import Any

import torch
import torch.distributed as dist

from memplan.errors import UsageError
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def rank_and_size() -> tuple[int, int] | None:
    """Of this process, as torchrun says; None: it did not start this one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(setup: TrainingSetup, *, has_gpu: bool) -> tuple[int, bool]:
    """Begin the job's process group where it has one; this process's rank, and whether it is alone.

    Raises ``UsageError`` where torchrun started another number of processes than the setup has GPUs,
    and where one process cannot stand for a rank.
    """
    started = rank_and_size()
    if started is not None and started[1] != setup.num_gpus:
        msg = (
            f"num_gpus: the setup is of {setup.num_gpus} GPUs, and torchrun started {started[1]} "
            "processes: let both be the same"
        )
        raise UsageError(msg)
    if started is not None and has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if setup.num_gpus > 1 or setup.chosen_engine is not Engine.DDP:
            # What ranks tell one another at the end goes over the CPU, and takes nothing of the cards.
            dist.init_process_group("cpu:gloo,cuda:nccl")
        return started[0], False
    if setup.chosen_engine is Engine.DEEPSPEED:
        processes = f"torchrun --nproc-per-node {setup.gpus_per_node} -m memplan verify ..."
        msg = f"engine: DeepSpeed's ranks are real processes: start them with {processes}"
        raise UsageError(msg)
    if setup.num_gpus > 1 or setup.chosen_engine is Engine.FSDP:
        _stand_alone(setup.num_gpus)
    return 0, setup.num_gpus > 1


def _stand_alone(num_ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())


def leave() -> None:
    """End the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gathered(mine: Any, *, is_alone: bool) -> list[Any]:
    """What every rank found, on every rank."""
    if is_alone or not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
