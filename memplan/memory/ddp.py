"""torch's DistributedDataParallel: whole parameters on every rank, gradients reduced in buckets.

Sources (torch 2.13): torch/csrc/distributed/c10d/reducer.cpp (``initialize_buckets``: a tensor for each
bucket, made at construction and kept; ``mark_variable_ready_dense``: a gradient is copied into its
bucket, and with ``gradient_as_bucket_view`` replaced by a view of it; ``autograd_hook`` does nothing
under ``no_sync``); torch/nn/parallel/distributed.py; ddp_comm_hooks/default_hooks.py.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import OptionReader, option_names
from memplan.training.precision import PrecisionFormats
from memplan.training.setup import TrainingSetup
from memplan.units import MIB

FIRST_BUCKET_BYTES = 1 * MIB
"""Cap of the first bucket to be reduced (``_DEFAULT_FIRST_BUCKET_BYTES``)."""
DEFAULT_BUCKET_CAP_MB = 25
"""Cap of the others [MiB] (``bucket_cap_mb``)."""


class CommHook(Enum):
    """How a bucket is reduced."""

    ALLREDUCE = "allreduce"
    """In place."""
    BF16_COMPRESS = "bf16_compress"
    """Through a copy in bf16."""
    FP16_COMPRESS = "fp16_compress"
    """Through a copy in fp16."""


_COMPRESSED = {CommHook.BF16_COMPRESS: DType.BF16, CommHook.FP16_COMPRESS: DType.FP16}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpOptions:
    """DDP's own settings; the field names are the option names."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets instead of tensors beside them."""
    bucket_cap_mb: float | None = None
    """Gradients reduced at once, those of the first bucket too; by default 25, and 1 for the first
    bucket [MiB]."""
    comm_hook: CommHook = CommHook.ALLREDUCE
    """How a bucket is reduced."""
    sync_each_batch: bool = False
    """Reduce at every micro-batch; else all but the last run under ``no_sync``, as accelerate does."""
    static_graph: bool = False
    """Changes when buckets are reduced, not what is held."""
    find_unused_parameters: bool = False
    """Changes what is reduced, not what is held."""
    broadcast_buffers: bool = True
    """Before a forward pass, flattened in a tensor where there are several of one format."""

    @classmethod
    def of(cls, setup: TrainingSetup) -> "DdpOptions":
        """Read them from a setup.

        Raises ``SetupError`` for options that do not exist or cannot be.
        """
        read = OptionReader(setup, option_names(cls))
        return cls(
            gradient_as_bucket_view=read.boolean("gradient_as_bucket_view", default=False),
            bucket_cap_mb=read.optional_number("bucket_cap_mb"),
            comm_hook=read.member("comm_hook", CommHook.ALLREDUCE),
            sync_each_batch=read.boolean("sync_each_batch", default=False),
            static_graph=read.boolean("static_graph", default=False),
            find_unused_parameters=read.boolean("find_unused_parameters", default=False),
            broadcast_buffers=read.boolean("broadcast_buffers", default=True),
        )

    @property
    def bucket_caps(self) -> tuple[int, int]:
        """Caps of the first bucket and of the others [bytes].

        A cap that is given is that of the first bucket too, 25 MiB like any other
        (torch/nn/parallel/distributed.py, ``first_bucket_bytes_cap``).
        """
        if self.bucket_cap_mb is None:
            return FIRST_BUCKET_BYTES, int(DEFAULT_BUCKET_CAP_MB * MIB)
        return int(self.bucket_cap_mb * MIB), int(self.bucket_cap_mb * MIB)


def compressed_format(options: DdpOptions, formats: PrecisionFormats) -> DType | None:
    """What buckets are copied to; None where they are not, as gradients that have that format
    already (``Tensor.to`` then returns the bucket itself).
    """
    compressed = _COMPRESSED.get(options.comm_hook)
    return None if compressed is formats.gradients else compressed
