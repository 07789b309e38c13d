"""``--check``, ``--fail-on`` and ``--baseline``: watch what passes by, judge it at the end."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TextIO, TypeVar

from memplan.errors import CheckFailedError, UsageError, did_you_mean
from memplan.options.axes import parse_share
from memplan.options.table import Values
from memplan.search.checks import FailOn, FitCheck, Scope
from memplan.text import printable, shown

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.model.spec import ModelSpec
    from memplan.search.baseline import Baseline, Origin
    from memplan.search.sweep import SweepResult

_Kind = TypeVar("_Kind", bound=Enum)


class Unmatched(Enum):
    """What rows do that the baseline or the new answer has alone."""

    FAIL = "fail"
    ALLOW = "allow"


class Checks:
    """What was asked for; nothing, by default."""

    def __init__(
        self,
        fit: FitCheck | None,
        baseline: "Baseline | None",
        *,
        baseline_name: str = "",
        tolerance: float = 0.0,
        unmatched: Unmatched = Unmatched.FAIL,
        annotated: str | None = None,
    ) -> None:
        self.fit = fit
        self.baseline = baseline
        self.baseline_name = baseline_name
        self.tolerance = tolerance
        self.unmatched = unmatched
        self.annotated = annotated
        """The file that GitHub's annotations are about; empty: none; None: there are no annotations."""
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

    def finish(self, stream: TextIO, model: "ModelSpec") -> None:
        """Say what moved, and raise ``CheckFailedError`` where a check does not hold."""
        failed = []
        if self.baseline is not None:
            failed += self._judge(self.baseline, origin_of(model), stream)
        if self.fit is not None and not self.fit.passed:
            failed.append(self.fit.message)
        if self.annotated is not None:
            self._annotate(self.annotated, model)
        if failed:
            stream.flush()
            raise CheckFailedError("; ".join(failed))

    def _annotate(self, file: str, model: "ModelSpec") -> None:
        """Write GitHub's annotations, which it reads from either stream."""
        from memplan.report.rows.annotations import baseline_annotations, fit_annotations

        lines: list[str] = []
        if self.fit is not None and not self.fit.passed:
            lines += fit_annotations(self.fit.failed, file=file)
        if self.baseline is not None:
            lines += baseline_annotations(
                self.baseline, tolerance=self.tolerance, now=origin_of(model), file=file
            )
        sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))

    def _judge(self, baseline: "Baseline", now: "Origin", stream: TextIO) -> list[str]:
        from memplan.report.rows.baseline import baseline_lines

        baseline.judge_model(now)
        lines = baseline_lines(baseline, name=self.baseline_name, tolerance=self.tolerance, now=now)
        stream.write("".join(f"{printable(line)}\n" for line in lines))
        failed = []
        regressions = baseline.regressions(self.tolerance)
        if regressions:
            failed.append(f"baseline: {len(regressions)} regressions, see above")
        if not baseline.is_matched and self.unmatched is Unmatched.FAIL:
            failed.append(
                f"baseline: {_what_differs(baseline)}: write it again with --format json, or pass "
                "--unmatched allow"
            )
        return failed


def _what_differs(baseline: "Baseline") -> str:
    if baseline.shape_changed:
        return "it is of a model of another shape"
    return f"{len(baseline.new)} rows are new and {len(baseline.gone)} gone, see above"


def origin_of(model: "ModelSpec") -> "Origin":
    """What a ``--format json`` document says of its making."""
    from memplan import __version__
    from memplan.model.fingerprint import model_fingerprint
    from memplan.search.baseline import Origin

    return Origin(version=__version__, fingerprint=model_fingerprint(model))


def about(model: "ModelSpec") -> dict[str, str]:
    """The same, as keys of the document."""
    from memplan.report.rows import documents

    return documents.about(model)


def check_rows(
    rows: "Iterable[Sequence[Estimate]]", checks: Checks, model: "ModelSpec", stream: TextIO
) -> None:
    """Judge estimates that were shown."""
    from memplan.search.sweep import SweepResult

    for _ in checks.watch(SweepResult(estimates=tuple(row)) for row in rows):
        pass
    checks.finish(stream, model)


def read_checks(values: Values) -> Checks:
    """The checks that the options ask for; ``--fail-on`` alone checks all setups.

    Raises ``UsageError`` for words that are none and for options that nothing uses, ``ConfigError``
    for a bad baseline.
    """
    check, fail_on, baseline = values["check"], values["fail_on"], values["baseline"]
    share = parse_share(values["tolerance"] or "0%", option="--tolerance")
    unmatched = _choice("--unmatched", values["unmatched"] or Unmatched.FAIL.value, Unmatched)
    for name in ("tolerance", "unmatched"):
        if values[name] is not None and baseline is None:
            msg = f"--{name}: is about a baseline, and none is named: give --baseline FILE"
            raise UsageError(msg)
    if values["annotate"] is not None and check is None and fail_on is None and baseline is None:
        msg = "--annotate: is about a check, and none is asked for: add --check or --baseline"
        raise UsageError(msg)
    fit = known = None
    if check is not None or fail_on is not None:
        fit = FitCheck(
            _choice("--check", check or Scope.ALL.value, Scope),
            _choice("--fail-on", fail_on or FailOn.OOM.value, FailOn),
        )
    if baseline is not None:
        from memplan.sources.baseline_file import read_baseline

        known = read_baseline(baseline)
    return Checks(
        fit,
        known,
        baseline_name=baseline or "",
        tolerance=share,
        unmatched=unmatched,
        annotated=values["annotate"],
    )


def _choice(option: str, text: str, kind: type[_Kind]) -> _Kind:
    known = [str(each.value) for each in kind]
    if text.lower() not in known:
        msg = (
            f"{option}: {shown(text)} is not one of {', '.join(known)}.{did_you_mean(text, known)}"
        )
        raise UsageError(msg)
    return kind(text.lower())
