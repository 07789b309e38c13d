"""What failures, checkpoints and evaluations take of a long run, and how often to save.

References
----------
.. [1] J. W. Young, "A first order approximation to the optimum checkpoint interval," CACM 17(9), 1974.
.. [2] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps," FGCS 22(3), 2006.
.. [3] "The Llama 3 herd of models," arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days of 16,384 H100
   (remembered, not read again).
.. [4] A. Kokolis et al., "Revisiting reliability in large-scale machine learning research clusters," arXiv:2410.21680:
   6.5 and 2.3 failures in 1,000 node-days of eight A100 (remembered, not read again).
.. [5] S. Zhang et al., "OPT," arXiv:2205.01068, section 2.5: at least 35 manual restarts and 70 automatic ones in two months
   of 992 A100, and its logbook: 57 days for what takes 33 without a stop (remembered, not read again).
.. [6] B. Wan et al., "Robust LLM training infrastructure at ByteDance," arXiv:2509.16293: 97 % of three months of 9,600 GPUs (abstract).
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from memplan.fast_dataclass import dataclass

DAY_S = 86_400


class Failing(NamedTuple):
    """How often a GPU ends its run, and how long it takes until the run goes on."""

    per_gpu_day: float
    restart_s: float


FAILING = (
    Failing(2.3 / 1000 / 8, 300.0),
    Failing(419 / 54 / 16_384, 600.0),
    Failing(105 / 60 / 992, 1800.0),
)
"""Few, as expected, many: [4], [3] and [5]; how long a restart takes is an assumption."""
ATTENDED = Failing(105 / 33 / 992, (57 - 33) * DAY_S / 105)
"""Many, where people find out and start again: by the days of its steps, each stop of [5] took 5.5 hours, the way since the last checkpoint
included."""
ATTENDED_GPUS = 1024
"""Up to how many GPUs the low end is a run that people look after: those that were published of more restart by themselves ([3], [6])."""
SAVED_BYTES_PER_S = 2_000_000_000
"""What a node writes to the storage that all nodes share, while training waits: an assumption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What of a run's days is spent on steps that last."""

    share: float
    low_share: float
    """With many failures."""
    high_share: float
    """With few."""
    failure_every_s: float
    """Of the whole run's GPUs."""
    save_every_s: float
    """Of steps between two checkpoints."""
    best_every_s: float
    """The interval with which least is lost (equation of [1])."""
    save_s: float
    """What one checkpoint takes."""
    saving_share: float
    """What checkpoints take of the days."""
    evaluating_share: float
    """And evaluations."""


def best_interval_s(save_s: float, failure_every_s: float) -> float:
    """Between two checkpoints, so that least is lost [s].

    Equation: ``sqrt(2 δ M)`` of [1]_, with ``δ`` a checkpoint's time and ``M`` the mean time between failures; [2]_
    has what comes next, which matters where a checkpoint takes as long as it is until the next failure.

    >>> best_interval_s(50.0, 40_000.0)
    2000.0
    """
    return sqrt(2 * save_s * failure_every_s)


def lost_share(save_s: float, interval_s: float, failure_every_s: float, restart_s: float) -> float:
    """Of the time that steps take, what is lost beside: saving, and after a failure half an interval and the restart.

    >>> round(lost_share(50.0, 2000.0, 40_000.0, 600.0), 3)
    0.065
    """
    return save_s / interval_s + (interval_s / 2 + restart_s) / failure_every_s


def goodput(
    num_gpus: int,
    num_nodes: int,
    checkpoint_bytes: int,
    *,
    save_every_s: float | None = None,
    evaluating: float = 0.0,
    per_gpu_day: float | None = None,
) -> Goodput:
    """Of a run on so many GPUs whose checkpoint has so many bytes.

    ``save_every_s``: between two checkpoints; None: the best. ``evaluating``: what evaluations take for each second of steps.
    ``per_gpu_day``: failures of one's own cluster; None: those that were published.

    >>> found = goodput(1024, 128, 10**12)
    >>> round(found.share, 3), round(found.failure_every_s / 3600), round(found.save_every_s / 60)
    (0.99, 49, 20)
    >>> often = goodput(1024, 128, 10**12, save_every_s=120.0, evaluating=0.05)
    >>> round(often.share, 3), round(often.saving_share, 3), round(often.evaluating_share, 3)
    (0.921, 0.03, 0.046)
    """
    save_s = checkpoint_bytes / (num_nodes * SAVED_BYTES_PER_S)
    rates = _rates(num_gpus, per_gpu_day)
    high, expected, low = (
        _share(num_gpus, save_s, each, save_every_s, evaluating) for each in rates
    )
    every_s = DAY_S / (num_gpus * rates[1].per_gpu_day)
    best_s = best_interval_s(save_s, every_s)
    interval_s = save_every_s or best_s
    return Goodput(
        share=expected,
        low_share=low,
        high_share=high,
        failure_every_s=every_s,
        save_every_s=interval_s,
        best_every_s=best_s,
        save_s=save_s,
        saving_share=expected * save_s / interval_s,
        evaluating_share=expected * evaluating,
    )


def _rates(num_gpus: int, per_gpu_day: float | None) -> Sequence[Failing]:
    """Few failures, as expected, many; where their number is known, restarts alone differ."""
    if per_gpu_day is None:
        return (*FAILING[:2], ATTENDED) if num_gpus <= ATTENDED_GPUS else FAILING
    return [each._replace(per_gpu_day=per_gpu_day) for each in FAILING]


def _share(
    num_gpus: int, save_s: float, failing: Failing, save_every_s: float | None, evaluating: float
) -> float:
    every_s = DAY_S / (num_gpus * failing.per_gpu_day)
    interval_s = save_every_s or best_interval_s(save_s, every_s)
    return 1 / (1 + evaluating + lost_share(save_s, interval_s, every_s, failing.restart_s))
