"""The largest micro-batch that fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan.estimator import Estimate, Verdict, estimate
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup

MAX_MICRO_BATCH = 65_536
"""Sequences of one micro-batch beyond which nobody looks for more."""

Fits = Callable[[Estimate], bool]
"""Whether an estimate is small enough."""


def fits(answer: Estimate) -> bool:
    """Whether even the high end of the range is within the GPU's memory."""
    return answer.verdict is Verdict.FITS


def largest_micro_batch(
    model: ModelSpec,
    setup: TrainingSetup,
    gpu: GpuSpec,
    *,
    fits: Fits = fits,
    at_least: int = 0,
    limit: int = MAX_MICRO_BATCH,
) -> int:
    """The largest ``micro_batch_size`` that fits, everything else being as in ``setup``; 0: none.

    Doubles until it no longer fits, then halves the interval: a larger micro-batch never needs less
    memory. ``at_least`` is one that is known to fit.

    >>> from memplan.sources.catalog import load_gpu
    >>> from memplan.sources.models import load_model
    >>> setup = TrainingSetup(seq_len=512, checkpointing="full")
    >>> largest_micro_batch(load_model("gpt2"), setup, load_gpu("v100-16gb"))
    32
    """

    def is_small_enough(size: int) -> bool:
        return fits(estimate(model, replace(setup, micro_batch_size=size), gpu))

    low, high = at_least, max(1, 2 * at_least)
    while high <= limit and is_small_enough(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if is_small_enough(middle):
            low = middle
        else:
            high = middle
    return low


def largest_of(sizes: Sequence[int], is_small_enough: Callable[[int], bool]) -> int | None:
    """The largest of some ascending sizes that is small enough, by bisection; None: not even one.

    >>> largest_of([1, 2, 4, 8], lambda size: size < 5)
    4
    """
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if is_small_enough(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else None
