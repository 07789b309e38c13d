"""A heat map: what each setup of a sweep needs, by two of its axes, with its verdict."""

from collections.abc import Sequence

from memplan.errors import UsageError, did_you_mean
from memplan.estimator import Estimate, Verdict
from memplan.report.pages.frame import VERDICT_CLASSES, VERDICT_MARKS
from memplan.report.pictures.canvas import CHARACTER, LINE, Canvas, Shape, Words, box, legend
from memplan.report.pictures.picture import Picture
from memplan.report.pivot import PIVOT_AXES, Pivot, column_of, ordered_places, pivots
from memplan.report.sweep import varying_columns
from memplan.search.sweep import Sweep, SweepResult
from memplan.units import GIB

CELL_WIDTH, CELL_HEIGHT = 92, 32
MARGIN = 12
WORDS = {"fits": "fits", "tight": "tight", "oom": "out of memory", "states": "what is counted fits"}


def heat_picture(
    sweep: Sweep,
    rows: str | None = None,
    columns: str | None = None,
    *,
    results: Sequence[SweepResult] | None = None,
) -> list[Picture]:
    """A map for each GPU and each combination of what else varies.

    ``rows`` and ``columns`` are axes of ``sweep --pivot``; by default the first two that vary.
    ``results`` are the sweep's own where they are known. Raises ``UsageError`` for an axis that there
    is not.
    """
    kept = list(sweep) if results is None else results
    varying = varying_columns(kept)
    down, across = _axes(kept, varying, rows, columns)
    pivot = Pivot(rows=down, columns=across)
    others = [name for name in varying if name not in pivot.hidden]
    found = pivots(kept, others, pivot)
    return [_map(sweep.model.name, title, cells, pivot) for title, cells in found.items()]


def _axes(
    results: Sequence[SweepResult], varying: Sequence[str], rows: str | None, columns: str | None
) -> tuple[str, str]:
    asked = [each for each in (rows, columns) if each is not None]
    for each in asked:
        if each not in PIVOT_AXES:
            msg = f"{each!r} is not one of {', '.join(PIVOT_AXES)}.{did_you_mean(each, PIVOT_AXES)}"
            raise UsageError(msg)
    free = [each for each in PIVOT_AXES if column_of(each) in varying]
    if len(results[0].estimates) > 1:
        free.append("gpu")
    usual = [each for each in (*free, "batch", "gpus", "seq-len") if each not in asked]
    first = rows or usual.pop(0)
    return first, columns or next(each for each in usual if each != first)


def _map(model: str, title: str, cells: dict[tuple[str, str], Estimate], pivot: Pivot) -> Picture:
    down, across = ordered_places(cells)
    below, beside = column_of(pivot.rows), column_of(pivot.columns)
    label = max(CHARACTER * len(each) for each in (*down, f"{below} \\ {beside}")) + 16
    widest = max(CELL_WIDTH, max(CHARACTER * len(each) for each in across) + 12)
    shapes: list[Shape] = [Words(x=MARGIN, y=24, text=f"{below} \\ {beside}", is_bold=True)]
    for place, name in enumerate(across):
        x = MARGIN + label + (place + 1) * widest - 8
        shapes.append(Words(x=x, y=24, text=name, anchor="end", is_bold=True))
    for line, row in enumerate(down):
        y = 34 + line * CELL_HEIGHT
        shapes.append(Words(x=MARGIN, y=y + 21, text=row))
        for place, column in enumerate(across):
            if (answer := cells.get((row, column))) is not None:
                told = f"{below} {row}, {beside} {column}: needs {answer.needs}, {answer.verdict or 'no GPU'}"
                shapes += _cell(answer, MARGIN + label + place * widest, y, widest, told)
    rows = [(row, *(_cell_text(cells.get((row, column))) for column in across)) for row in down]
    seen = {_kind(each) for each in cells.values()}
    named = [(kind, f"{VERDICT_MARKS[kind]} {WORDS[kind]}") for kind in WORDS if kind in seen]
    width = max(MARGIN * 2 + label + widest * len(across), 360.0)
    drawn, end = legend(
        named, x=MARGIN, y=34 + len(down) * CELL_HEIGHT + 24, width=width - 2 * MARGIN
    )
    note = Words(x=MARGIN, y=end + LINE, text="GiB needed, at the most")
    name = f"{model}{', ' + title if title else ''}: {below} by {beside}"
    fits = sum(_kind(each) == "fits" for each in cells.values())
    return Picture(
        title=name,
        words=f"{fits} of {len(cells)} setups fit",
        canvas=Canvas(width=width, height=end + 2 * LINE, shapes=(*shapes, *drawn, note)),
        head=(f"{below} \\ {beside}", *across),
        rows=tuple(rows),
        chart=tuple(_chart((f"{below} \\ {beside}", *across), rows, seen)),
    )


def _cell_text(answer: Estimate | None) -> str:
    """What is needed, and the verdict's mark."""
    if answer is None:
        return ""
    return f"{answer.total_bytes.high / GIB:,.1f} {VERDICT_MARKS[_kind(answer)]}".strip()


def _cell(answer: Estimate, x: float, y: float, width: float, told: str) -> list[Shape]:
    """A cell of the map: its colour says the verdict."""
    text = Words(x=x + width - 10, y=y + 21, text=_cell_text(answer), anchor="end")
    return [box(x, y, width - 2, CELL_HEIGHT - 2, _kind(answer) or "panel", told), text]


def _kind(answer: Estimate) -> str:
    verdict: Verdict | None = answer.job_verdict
    return VERDICT_CLASSES[verdict] if verdict is not None else ""


def _chart(head: Sequence[str], rows: Sequence[Sequence[str]], seen: set[str]) -> list[str]:
    table = [head, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    told = ", ".join(f"{VERDICT_MARKS[kind]} {WORDS[kind]}" for kind in WORDS if kind in seen)
    return [*lines, f"GiB needed, at the most{': ' + told if told else ''}"]
