"""Measured runs, predicted once more: nothing here needs torch."""

from pathlib import Path

from memplan.estimator import estimate
from memplan.estimator.measured import Measurement
from memplan.report.verify import Verified
from memplan.sources.measurement_file import card_of, read_measurement
from memplan.sources.models import load_model


def beside(measured: Measurement, source: str = "") -> Verified:
    """A measurement, and the prediction of its run on its card.

    Raises a ``MemplanError`` for a model or a setup that cannot be estimated.
    """
    model = load_model(dict(measured.model), measured.task)
    answer = estimate(model, measured.setup, card_of(measured))
    return Verified(measured=measured, estimate=answer, source=source)


def replayed(path: str | Path) -> Verified:
    """The same of a recorded one; raises ``ConfigError`` for a file that is none."""
    return beside(read_measurement(path), source=str(path))
