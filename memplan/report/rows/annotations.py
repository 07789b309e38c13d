"""What turned, as GitHub's workflow commands: each becomes a remark at a file of the pull request.

Workflow commands for GitHub Actions: ``::error file=F,title=T::message``; of each kind it shows ten a step.
"""

from collections.abc import Iterable, Sequence

from memplan.report.rows.baseline import change_text, move_text, row_label, why_text
from memplan.search.baseline import Baseline, Origin, Row

MOST = 10
"""Of a kind, in one step."""


def baseline_annotations(
    baseline: Baseline, *, tolerance: float, now: Origin, file: str
) -> list[str]:
    """Errors for regressions, warnings for what else moved, was asked otherwise, is new or gone."""
    worse = baseline.regressions(tolerance)
    why = why_text(baseline, now)
    errors = [f"{move_text(each)}{why}" for each in worse]
    warnings = [f"{move_text(each)}{why}" for each in baseline.moves if each not in worse]
    changed = baseline.changed
    warnings += [change_text(each) for each in changed]
    paired = [id(row) for each in changed for row in (each.before, each.after)]
    warnings += [
        f"{row_label(row)}: not in the baseline" for row in baseline.new if id(row) not in paired
    ]
    warnings += [
        f"{row_label(row)}: only in the baseline" for row in baseline.gone if id(row) not in paired
    ]
    return [
        *_commands("error", errors, "memory: worse than the baseline", file),
        *_commands("warning", warnings, "memory: not as in the baseline", file),
    ]


def fit_annotations(failed: Sequence[Row], *, file: str) -> list[str]:
    """An error for each setup that is OOM, a warning for what is tight or not known whole."""
    texts = {
        kind: [f"{row_label(row)}: {_needs(row)}" for row in failed if (row["verdict"] == "OOM") == worst]
        for kind, worst in (("error", True), ("warning", False))
    }  # fmt: skip
    return [
        *_commands("error", texts["error"], "memory: does not fit", file),
        *_commands("warning", texts["warning"], "memory: does not fit for certain", file),
    ]


def _needs(row: Row) -> str:
    low, high, capacity = (
        int(str(row.get(name) or 0)) / 2**30
        for name in ("total_low_bytes", "total_high_bytes", "gpu_capacity_bytes")
    )
    return f"{row['verdict']}, needs {low:,.1f}-{high:,.1f} of {capacity:,.1f} GiB"


def _commands(kind: str, texts: Sequence[str], title: str, file: str) -> Iterable[str]:
    """One command for each text, the last one for those that GitHub would not show."""
    shown = list(texts) if len(texts) <= MOST else list(texts[: MOST - 1])
    if len(shown) < len(texts):
        shown.append(f"... and {len(texts) - len(shown)} more")
    place = f"file={_property(file)}," if file else ""
    return [f"::{kind} {place}title={_property(title)}::{_escaped(text)}" for text in shown]


def _escaped(text: str) -> str:
    """A message, of which percent signs and line ends would be read.

    >>> _escaped("5 % more")
    '5 %25 more'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A property, in which colons and commas would be too."""
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
