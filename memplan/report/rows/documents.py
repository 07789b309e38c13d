"""What ``--format json`` writes, as values: rows with what was assumed for them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.model.spec import ModelSpec
    from memplan.search.advice import Advice
    from memplan.search.planning.goal import Plan
    from memplan.search.sweep import Sweep

Row = Mapping[str, object]


def document(
    rows: Iterable[Row],
    *,
    schema_version: int,
    assumptions: Sequence[str] = (),
    about: Mapping[str, str] | None = None,
    hints: Sequence[Row] | None = None,
) -> dict[str, object]:
    """``{"schema_version", "assumptions", "rows"}``, ``about`` after the first, and ``hints``."""
    return {
        "schema_version": schema_version,
        **(about or {}),
        "assumptions": list(assumptions),
        **({"hints": list(hints)} if hints is not None else {}),
        "rows": list(rows),
    }


def about(model: "ModelSpec") -> dict[str, str]:
    """What a document says of its making."""
    from memplan.model.fingerprint import model_fingerprint
    from memplan.version import __version__

    return {"memplan_version": __version__, "model_fingerprint": model_fingerprint(model)}


def data_frame(answer: "Sweep | Plan") -> Any:
    """The rows as a ``pandas.DataFrame``.

    Raises ``UsageError`` where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        from memplan.errors import UsageError

        msg = "to_pandas: pandas is not installed: pip install pandas, or take rows()"
        raise UsageError(msg) from None
    return pandas.DataFrame(answer.rows())


def sweep_document(sweep: "Sweep") -> dict[str, object]:
    """Of ``memplan sweep``."""
    from memplan.estimator.estimate import SCHEMA_VERSION

    rows = sweep.rows()
    return document(
        rows,
        schema_version=SCHEMA_VERSION,
        assumptions=sweep.assumptions,
        about=about(sweep.model),
    )


def plan_row_list(plan: "Plan") -> list[dict[str, object]]:
    """Rows of ``memplan plan``."""
    from memplan.report.plans.rows import plan_rows

    return list(plan_rows(plan, plan.times))


def plan_document(plan: "Plan") -> dict[str, object]:
    """Of ``memplan plan``."""
    from memplan.estimator.estimate import SCHEMA_VERSION

    return document(
        plan_row_list(plan),
        schema_version=SCHEMA_VERSION,
        assumptions=plan.assumptions,
        about=about(plan.some.model),
    )


def timed_row(answer: "Estimate") -> dict[str, object]:
    """What a row tells of time, where it was asked for."""
    from memplan.report.estimates.times import time_row

    assert answer.times is not None, "nobody asked for times"
    return time_row(answer, answer.times)


def hint_row(advice: "Advice") -> dict[str, object]:
    """One of the document's ``hints``."""
    from memplan.report.rows.hints import hint_rows
    from memplan.search.advice import Hints

    return hint_rows([[advice.answer]], Hints(largest={}, advice=(advice,)))[0]
