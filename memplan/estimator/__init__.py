"""One question answered: the memory of a model trained in one way, on one kind of GPU."""

from memplan.estimator.estimate import Estimate, Verdict
from memplan.estimator.estimation import (
    at_high_end,
    bare_estimate,
    estimate,
    is_long_to_tell,
    least_bytes,
    told,
    walked_bytes,
)
from memplan.estimator.handing_over import without_run

__all__ = [
    "Estimate",
    "Verdict",
    "at_high_end",
    "bare_estimate",
    "estimate",
    "is_long_to_tell",
    "least_bytes",
    "told",
    "walked_bytes",
    "without_run",
]
