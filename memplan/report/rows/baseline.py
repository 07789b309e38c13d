"""What moved since a baseline, as people read it."""

from collections.abc import Iterable, Iterator

from memplan.search.baseline import Baseline, Changed, Move, Origin, Row
from memplan.units import GIB

MAX_MOVES = 20
"""Rows of a kind (moved, new, gone) that are written out; the rest are counted."""
_NAMED = (
    "num_gpus", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer", "offload_param",
    "micro_batch_size", "seq_len", "checkpointing", "precision", "other_settings", "gpu",
)  # fmt: skip
"""What names a row in one line."""
_WORDS = {
    "num_gpus": "{} GPUs", "zero_stage": "stage {}", "micro_batch_size": "batch {}",
    "seq_len": "{} tokens", "checkpointing": "checkpointing {}", "gpu": "on {}",
    "offload_optimizer": "optimizer on {}", "offload_param": "parameters on {}",
}  # fmt: skip
_UNSAID = (None, "", "none")
"""Values that go without saying."""


def baseline_lines(
    baseline: Baseline, *, name: str, tolerance: float, now: Origin | None = None
) -> list[str]:
    """One line of sums, then one for each row that moved, is new or is gone; regressions are marked."""
    regressions = baseline.regressions(tolerance)
    moved, gone = len(baseline.moves), baseline.gone
    head = (
        f"Since {name}: {moved} of {baseline.num_compared} rows moved, "
        f"{len(regressions)} for the worse beyond {100 * tolerance:g} %; "
        f"{len(baseline.new)} new, {len(gone)} gone"
    )
    first = [*regressions, *(move for move in baseline.moves if move not in regressions)]
    why = why_text(baseline, now)
    changed = baseline.changed
    paired = {id(row) for each in changed for row in (each.before, each.after)}
    new = [row for row in baseline.new if id(row) not in paired]
    left = [row for row in gone if id(row) not in paired]
    return [
        head,
        *_about(baseline, now),
        *_some(f"{move_line(move, tolerance=tolerance)}{why}" for move in first),
        *_some(f"~ {change_text(each)}" for each in changed),
        *_some(f"+ {row_label(row)}: not in the baseline" for row in new),
        *_some(f"- {row_label(row)}: only in the baseline" for row in left),
    ]


def why_text(baseline: Baseline, now: Origin | None) -> str:
    """Why rows that ask the same are answered otherwise: the model's shape, or memplan's version; empty: not known.

    >>> why_text(Baseline([]), None)
    ''
    """
    if baseline.shape_changed:
        return ", as the model is another"
    if baseline.origin is not None and now is not None and baseline.origin.version != now.version:
        return f", by memplan {now.version} instead of {baseline.origin.version}"
    return ""


def change_text(change: Changed) -> str:
    """A setup that is asked otherwise, what of it, and what that makes."""
    before, after = change.before, change.after
    asked = " and ".join(
        f"{name.replace('_', ' ')} {_said(before, name)} -> {_said(after, name)}"
        for name in change.names
    )
    peaks = [int(str(row.get("peak_bytes") or 0)) / GIB for row in (before, after)]
    text = f"{row_label(before)}: {asked}: peak {peaks[0]:,.2f} -> {peaks[1]:,.2f} GiB"
    if before.get("verdict") != after.get("verdict"):
        text += f", {before.get('verdict')} -> {after.get('verdict')}"
    return text


def _said(row: Row, name: str) -> str:
    value = row.get(name)
    return "none" if value in _UNSAID else str(value)


def _about(baseline: Baseline, now: Origin | None) -> list[str]:
    """What is another model or another memplan than it was."""
    lines = []
    if baseline.shape_changed:
        lines.append("! the model is not the baseline's: its shape differs")
    if baseline.origin is not None and now is not None and baseline.origin.version != now.version:
        lines.append(
            f"  the baseline is of memplan {baseline.origin.version}, this is {now.version}"
        )
    return lines


def _some(lines: Iterable[str]) -> Iterator[str]:
    more = 0
    for number, line in enumerate(lines):
        if number < MAX_MOVES:
            yield line
        else:
            more += 1
    if more:
        yield f"  ... and {more} more"


def row_label(row: Row) -> str:
    """What was asked, in one line."""
    named = [_named(key, row[key]) for key in _NAMED if row.get(key) not in _UNSAID]
    return ", ".join(named)


def _named(key: str, value: object) -> str:
    """One thing that was asked."""
    if key == "num_gpus" and value == 1:
        return "1 GPU"
    return _WORDS.get(key, "{}").format(f"{value:,}" if isinstance(value, int) else value)


def move_line(move: Move, *, tolerance: float) -> str:
    """One row that moved."""
    mark = "!" if move.is_regression(tolerance) else " "
    return f"{mark} {move_text(move)}"


def move_text(move: Move) -> str:
    """The same without its mark."""
    text = (
        f"{row_label(move.row)}: peak {move.before_bytes / GIB:,.2f} -> "
        f"{move.after_bytes / GIB:,.2f} GiB ({100 * move.growth:+.2f} %)"
    )
    if move.before_verdict != move.after_verdict:
        text += f", {move.before_verdict} -> {move.after_verdict}"
    return text
