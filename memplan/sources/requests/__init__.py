"""A job's request, written for the scheduler that starts it.

One module for each: ``text(request) -> str``. ``train.py`` stands for the script, as every text says in a comment.
"""

from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.estimator.job_request import JobRequest

__all__ = ["Scheduler", "request_text"]


class Scheduler(Enum):
    """What a request can be written for."""

    SLURM = "slurm"
    """A batch script for ``sbatch``."""
    KUBERNETES = "kubernetes"
    """An indexed ``batch/v1`` Job with the headless Service over which its pods find one another."""
    KUEUE = "kueue"
    """The same, suspended in a queue of Kueue's."""
    SKYPILOT = "skypilot"
    """A task for ``sky launch``."""
    RAY = "ray"
    """A script for Ray Train, which ``ray job submit`` starts."""

    @property
    def takes_time(self) -> bool:
        """Whether it knows a limit of time."""
        return self in (Scheduler.SLURM, Scheduler.KUBERNETES, Scheduler.KUEUE)


def request_text(request: "JobRequest", scheduler: Scheduler) -> str:
    """The request as a file of the scheduler's."""
    module = import_module(f"memplan.sources.requests.{scheduler.value}")
    return cast("Callable[[JobRequest], str]", module.text)(request)
