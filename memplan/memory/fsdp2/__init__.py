"""FSDP2, torch's ``fully_shard`` (torch 2.13, torch/distributed/fsdp/_fully_shard)."""

from memplan.memory.fsdp2.options import Fsdp2Options

__all__ = ["Fsdp2Options"]
