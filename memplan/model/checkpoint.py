"""What a checkpoint's size says of its parameters."""

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCount:
    """One reading of a checkpoint's size."""

    format: str
    """What its numbers are, or would be."""
    unit: str
    """What a size was taken to mean where it leaves that open: ``GB`` or ``GiB``; else empty."""
    num_bytes: int
    num_params: int
