"""What runs beside the trained model's own passes in a step, by what it takes."""

from typing import NamedTuple

OTHERS = "other models' passes"
GENERATION = "generating completions"
HANDING_OVER = "handing weights to the rollout engine"


class SidePass(NamedTuple):
    """What runs before the trained model does, all of its kind in a step, or in a micro-batch."""

    words: str
    device_s: float = 0.0
    asked_s: float = 0.0
    """Of the CPU of the prices."""
    sent_s: float = 0.0
    """Between GPUs."""
    host_s: float = 0.0
    """To CPU RAM and back."""
    ahead_s: float = 0.0
    """Between GPUs, beside computing."""
    is_shorter: bool = False
    """It may be: completions."""


class SidePasses(NamedTuple):
    """Of a job."""

    of_step: tuple[SidePass, ...] = ()
    of_micro_batch: tuple[SidePass, ...] = ()


NO_SIDE_PASSES = SidePasses()
