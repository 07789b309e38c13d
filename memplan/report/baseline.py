"""What moved since a baseline, as people read it."""

from memplan.search.baseline import Baseline, Move
from memplan.units import GIB

MAX_MOVES = 20
"""Moves that are written out; the rest are counted."""
_NAMED = (
    "num_gpus", "engine", "zero_stage", "fsdp_strategy", "micro_batch_size", "seq_len",
    "checkpointing", "precision", "gpu",
)  # fmt: skip
"""What names a row in one line."""
_WORDS = {
    "num_gpus": "{} GPUs", "zero_stage": "stage {}", "micro_batch_size": "batch {}",
    "seq_len": "{} tokens", "checkpointing": "checkpointing {}", "gpu": "on {}",
}  # fmt: skip


def baseline_lines(baseline: Baseline, *, name: str, tolerance: float) -> list[str]:
    """One line of sums, then one for each move; regressions are marked."""
    regressions = baseline.regressions(tolerance)
    moved = len(baseline.moves)
    head = (
        f"Since {name}: {moved} of {baseline.num_compared} rows moved, "
        f"{len(regressions)} for the worse beyond {100 * tolerance:g} %; "
        f"{baseline.num_new} new, {baseline.num_gone} gone"
    )
    first = [*regressions, *(move for move in baseline.moves if move not in regressions)]
    lines = [head, *(move_line(move, tolerance=tolerance) for move in first[:MAX_MOVES])]
    if moved > MAX_MOVES:
        lines.append(f"  ... and {moved - MAX_MOVES} more")
    return lines


def move_line(move: Move, *, tolerance: float) -> str:
    """One row that moved."""
    named = [
        _WORDS.get(key, "{}").format(move.row[key])
        for key in _NAMED
        if move.row.get(key) is not None
    ]
    mark = "!" if move.is_regression(tolerance) else " "
    text = (
        f"{mark} {', '.join(named)}: peak {move.before_bytes / GIB:,.2f} -> "
        f"{move.after_bytes / GIB:,.2f} GiB ({100 * move.growth:+.2f} %)"
    )
    if move.before_verdict != move.after_verdict:
        text += f", {move.before_verdict} -> {move.after_verdict}"
    return text
