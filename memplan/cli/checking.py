"""``--check``, ``--fail-on`` and ``--baseline``: watch what passes by, judge it at the end."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TextIO, TypeVar

from memplan.cli.sweep_options import parse_share
from memplan.errors import CheckFailedError, UsageError, did_you_mean
from memplan.search.checks import FailOn, FitCheck, Scope
from memplan.text import printable

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.search.baseline import Baseline
    from memplan.search.sweep import SweepResult

_Kind = TypeVar("_Kind", bound=Enum)


class Checks:
    """What was asked for; nothing, by default."""

    def __init__(
        self,
        fit: FitCheck | None,
        baseline: "Baseline | None",
        *,
        baseline_name: str = "",
        tolerance: float = 0.0,
    ) -> None:
        self.fit = fit
        self.baseline = baseline
        self.baseline_name = baseline_name
        self.tolerance = tolerance
        self._compared = False

    def watch(self, results: "Iterable[SweepResult]") -> "Iterator[SweepResult]":
        """Hand results on, counting verdicts."""
        for result in results:
            if self.fit is not None:
                for each in result.estimates:
                    self.fit.add(each)
            if self.baseline is not None and not self._compared:
                for each in result.estimates:
                    self.baseline.compare(each.to_dict())
            yield result

    def rows(self, rows: Iterable[Mapping[str, object]]) -> Iterable[Mapping[str, object]]:
        """Hand rows on, comparing them with the baseline: they need not be made twice."""
        if self.baseline is None:
            return rows
        self._compared = True
        return self._compare(rows, self.baseline)

    def _compare(
        self, rows: Iterable[Mapping[str, object]], baseline: "Baseline"
    ) -> Iterator[Mapping[str, object]]:
        for row in rows:
            baseline.compare(row)
            yield row

    def finish(self, stream: TextIO) -> None:
        """Say what moved, and raise ``CheckFailedError`` where a check does not hold."""
        failed = []
        if self.baseline is not None:
            from memplan.report.baseline import baseline_lines

            lines = baseline_lines(self.baseline, name=self.baseline_name, tolerance=self.tolerance)
            stream.write("".join(f"{printable(line)}\n" for line in lines))
            regressions = self.baseline.regressions(self.tolerance)
            if regressions:
                failed.append(f"baseline: {len(regressions)} regressions, see above")
        if self.fit is not None and not self.fit.passed:
            failed.append(self.fit.message)
        if failed:
            stream.flush()
            raise CheckFailedError("; ".join(failed))


def check_rows(rows: "Iterable[Sequence[Estimate]]", checks: Checks, output_format: str) -> None:
    """Judge estimates that were shown; what moved goes to stderr where stdout is for a script."""
    from memplan.search.sweep import SweepResult

    for _ in checks.watch(SweepResult(estimates=tuple(row)) for row in rows):
        pass
    checks.finish(sys.stdout if output_format == "table" else sys.stderr)


def read_checks(
    check: str | None, fail_on: str | None, baseline: str | None, tolerance: str
) -> Checks:
    """The checks that the options ask for; ``--fail-on`` alone checks all setups.

    Raises ``UsageError`` for words that are none, ``ConfigError`` for a bad baseline.
    """
    share = parse_share(tolerance, option="--tolerance")
    fit = None
    if check is not None or fail_on is not None:
        fit = FitCheck(
            _choice("--check", check or Scope.ALL.value, Scope),
            _choice("--fail-on", fail_on or FailOn.OOM.value, FailOn),
        )
    known = None
    if baseline is not None:
        from memplan.sources.baseline_file import read_baseline

        known = read_baseline(baseline)
    return Checks(fit, known, baseline_name=baseline or "", tolerance=share)


def _choice(option: str, text: str, kind: type[_Kind]) -> _Kind:
    known = [str(each.value) for each in kind]
    if text.lower() not in known:
        msg = f"{option}: {text!r} is not one of {', '.join(known)}.{did_you_mean(text, known)}"
        raise UsageError(msg)
    return kind(text.lower())
