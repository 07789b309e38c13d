"""FSDP1, torch's ``FullyShardedDataParallel`` (torch 2.13, torch/distributed/fsdp)."""

from memplan.memory.fsdp1.options import Fsdp1Options

__all__ = ["Fsdp1Options"]
