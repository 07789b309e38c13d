"""Choices of a training setup that need no module of their own, and how checkpointing is written."""

from enum import Enum, IntEnum

from memplan.training.layer_choice import CheckpointedLayers


class ZeroStage(IntEnum):
    """What DeepSpeed shards over the data-parallel ranks."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class FsdpStrategy(Enum):
    """What FSDP shards."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    HYBRID = "hybrid"
    NO_SHARD = "no_shard"


class Offload(Enum):
    """Where optimizer states or parameters are kept."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"

    __hash__ = object.__hash__


class AllocatorKind(Enum):
    """How torch's caching allocator has memory (``PYTORCH_CUDA_ALLOC_CONF``)."""

    DEFAULT = "default"
    """In segments, which are stranded where no block fits them any more."""
    EXPANDABLE = "expandable"
    """``expandable_segments:True``: in pages, mapped where they are needed."""


class Recomputation(Enum):
    """Which activations are dropped in forward and computed again in backward."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


Checkpointing = Recomputation | float | CheckpointedLayers
"""Which layers are checkpointed, and how."""


def checkpointing_text(value: Checkpointing) -> str:
    """``none``, ``full``, ``selective``, a share of layers, or their numbers.

    >>> checkpointing_text(0.5), checkpointing_text(CheckpointedLayers.parse("0-7,12"))
    ('50%', 'layers.0-7+12')
    """
    if isinstance(value, Recomputation):
        return value.value
    return f"{value:.0%}" if isinstance(value, float) else str(value)
