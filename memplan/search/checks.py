"""Whether a run of setups is acceptable: what ``--check`` and ``--fail-on`` ask."""

from enum import Enum

from memplan.estimator import Estimate, Verdict


class Scope(Enum):
    """Which of several setups have to fit."""

    ALL = "all"
    """Every setup, on every GPU."""
    ANY = "any"
    """At least one setup on one GPU."""


class FailOn(Enum):
    """From which verdict on a setup counts as not fitting."""

    OOM = "oom"
    TIGHT = "tight"
    """Also what is tight, or left something out."""


MOST_KEPT = 20
"""Rows that do not fit and are kept, to be told."""


class FitCheck:
    """Counts verdicts as they come."""

    def __init__(self, scope: Scope = Scope.ALL, fail_on: FailOn = FailOn.OOM) -> None:
        self.scope = scope
        self.fail_on = fail_on
        self.num_seen = 0
        self.failed: list[dict[str, object]] = []
        """Rows of what does not fit, the first ones."""
        self.num_failed = 0

    def add(self, answer: Estimate) -> None:
        """Take one estimate into account."""
        self.num_seen += 1
        if self._fails(answer):
            self.num_failed += 1
            if len(self.failed) < MOST_KEPT:
                self.failed.append(answer.to_dict())

    def _fails(self, answer: Estimate) -> bool:
        if self.fail_on is FailOn.OOM:
            return answer.job_verdict is Verdict.OOM
        return answer.job_verdict is not Verdict.FITS

    @property
    def passed(self) -> bool:
        """Whether what was seen so far is acceptable."""
        if self.scope is Scope.ANY:
            return self.num_failed < self.num_seen
        return bool(self.num_seen) and not self.num_failed

    @property
    def message(self) -> str:
        """What was found, for an error."""
        what = "are OOM" if self.fail_on is FailOn.OOM else "do not fit for certain"
        total = f"{self.num_failed} of {self.num_seen} (setup, GPU) pairs {what}"
        return f"check {self.scope.value}: {total}"
