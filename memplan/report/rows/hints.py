"""Hints as rows for scripts: how far one could go, and what would help."""

from collections.abc import Sequence

from memplan.estimator import Estimate
from memplan.report.estimates.changes import change_flags, describe_change
from memplan.report.rows.schema import LARGEST_MICRO_BATCH
from memplan.search.advice import Advice, Hints

Rows = Sequence[Sequence[Estimate]]


def hinted_rows(rows: Rows, hints: Hints) -> list[dict[str, object]]:
    """The flat rows of an estimate, each with the largest micro-batch that fits."""
    return [
        {**each.to_dict(), LARGEST_MICRO_BATCH: _largest(hints, number, each)}
        for number, row in enumerate(rows)
        for each in row
    ]


def _largest(hints: Hints, number: int, answer: Estimate) -> int | None:
    gpu = answer.gpu
    return hints.largest.get((number, gpu.gpu_id)) if gpu is not None else None


def hint_rows(rows: Rows, hints: Hints) -> list[dict[str, object]]:
    """What would make a GPU do that no row fits; ``HINT_MEANINGS`` says what each key is."""
    flat = [each for row in rows for each in row]
    return [_hint(each, flat) for each in hints.advice]


def _hint(advice: Advice, flat: Sequence[Estimate]) -> dict[str, object]:
    from memplan.report.estimates.times import time_factor  # which most answers do without

    answer, better = advice.answer, advice.better
    factor = time_factor(answer, better) if better is not None else None
    # The answer may have been replayed since, for the advice's sake.
    asked = (answer.setup, answer.gpu)
    row = next(number for number, each in enumerate(flat) if (each.setup, each.gpu) == asked)
    return {
        "gpu": answer.gpu.gpu_id if answer.gpu is not None else None,
        "row": row,
        "missing_bytes": advice.missing_bytes,
        "change": describe_change(answer.setup, better.setup) if better is not None else None,
        "options": change_flags(answer.setup, better.setup) if better is not None else None,
        "saved_bytes": advice.saved_bytes if better is not None else None,
        "verdict": better.verdict.value if better is not None and better.verdict else None,
        "time_factor": round(factor, 3) if factor is not None else None,
    }
