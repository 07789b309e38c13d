"""A sweep as a matrix: one figure by two of the axes, a heat map where there is colour."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.fast_dataclass import dataclass
from memplan.report.estimates.account import deciding_text
from memplan.report.sweep import (
    COLUMNS,
    footnotes,
    in_words,
    print_counts,
    print_head,
    varying_columns,
)
from memplan.report.terminal.blocks import Column, print_blocks
from memplan.search.sweep import Sweep, SweepResult
from memplan.units import GIB, format_gib

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console, Text

HEAT_STYLES = {
    Verdict.FITS: "black on green", Verdict.TIGHT: "black on yellow",
    Verdict.OOM: "bold white on red", Verdict.STATES_FIT: "black on cyan",
}  # fmt: skip
MARKS = {Verdict.FITS: "", Verdict.TIGHT: "~", Verdict.OOM: "!", Verdict.STATES_FIT: "?"}
"""A verdict where there is room for one character, and no colour."""


class Figure(StrEnum):
    """What a matrix shows."""

    PEAK = "peak"
    """Allocated at the fullest moment of a step."""
    TOTAL = "total"
    """What nvidia-smi would show, the high end of the range."""
    HEADROOM = "headroom"
    """What that leaves of the GPU; below zero where it does not fit."""
    HOST = "host"
    """CPU memory of a node."""
    ACTIVATIONS = "activations"
    """What the forward pass leaves for the backward pass."""
    TEXTBOOK = "textbook"
    """The same by the textbook's formula, which knows no kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """What a matrix shows, and by what."""

    figure: Figure = Figure.PEAK
    rows: str = "batch"
    columns: str = "gpus"

    @property
    def hidden(self) -> frozenset[str]:
        """Columns of a table that a matrix needs no title for: its axes, and what follows from them."""
        axes = {_AXES[self.rows], _AXES[self.columns]}
        return frozenset(axes.union(*(_FOLLOWS.get(each, ()) for each in axes)))


_AXES = {
    "batch": "batch", "gpus": "GPUs", "seq-len": "tokens", "checkpointing": "checkpointing",
    "precision": "precision", "optimizer": "optimizer", "kernels": "kernels",
    "dropout": "dropout", "freeze": "frozen", "quantize": "base", "accumulation": "accumulated",
    "nodes": "nodes", "setup": "setup", "gpu": "gpu",
}  # fmt: skip
"""What a matrix may be laid out by, as it is typed, and the column that says it."""
PIVOT_AXES = tuple(_AXES)
_FOLLOWS = {"GPUs": ("nodes",), "batch": ("accumulated",)}


def column_of(axis: str) -> str:
    """The column of a sweep's table that an axis lays out by."""
    return _AXES[axis]


def print_pivot(
    console: "Console", sweep: Sweep, results: Sequence[SweepResult], pivot: Pivot
) -> None:
    """Print one matrix for every other combination and each GPU type."""
    from memplan.report.terminal.console import Text

    varying = [name for name in varying_columns(results) if name not in pivot.hidden]
    print_counts(console, results)
    print_head(console, results, [*varying, *pivot.hidden])
    for title, cells in pivots(results, varying, pivot).items():
        console.print()
        console.print(Text(title, style="bold"))
        for drawn in pivot_lines(console.width, cells, pivot):
            console.print(drawn, soft_wrap=True)
    console.print()
    legend = _PIVOT_LEGEND.format(
        _AXES[pivot.rows], _AXES[pivot.columns], FIGURE_WORDS[pivot.figure]
    )
    if pivot.figure is Figure.PEAK and any(map(deciding_text, _answers(results))):
        legend += ". Where loading or saving decides, the matrix says so"
    console.print(Text(legend, style="dim"))
    if sweep.node_memory_bytes is not None:
        node = format_gib(sweep.node_memory_bytes, digits=1)
        console.print(
            Text(f"! is also where a node's {node} of CPU RAM are not enough", style="dim")
        )
    for line in footnotes(sweep, results)[1:]:
        console.print(Text(line, style="dim"))


def _answers(results: Sequence[SweepResult]) -> Iterator[Estimate]:
    return (each for result in results for each in result.estimates)


FIGURE_WORDS = {
    Figure.PEAK: "the peak that PyTorch allocates",
    Figure.TOTAL: "what nvidia-smi would show at the most",
    Figure.HEADROOM: "what is left of the GPU at the least",
    Figure.HOST: "CPU memory of a node",
    Figure.ACTIVATIONS: "what the forward pass leaves for the backward pass",
    Figure.TEXTBOOK: "activations by the textbook, L x sbh(34 + 5as/h) (arXiv:2205.05198), no logits",
}
_PIVOT_LEGEND = (
    "Rows: {}, columns: {}; {}, in GiB = 2^30 bytes. ! out of memory, ~ tight, no mark: fits"
)

Cells = dict[tuple[str, str], Estimate]
"""What the row and the column say -> the estimate."""


def _placed(answer: Estimate, axis: str) -> str:
    """What an axis says of an estimate."""
    column = _AXES[axis]
    if column in COLUMNS:
        return COLUMNS[column](answer.setup)
    return answer.gpu.short_name if answer.gpu is not None else "any"


def pivots(
    results: Sequence[SweepResult], varying: Sequence[str], pivot: Pivot
) -> dict[str, Cells]:
    """One matrix for each GPU type and each combination of what else varies."""
    found: dict[str, Cells] = {}
    by_gpu = "gpu" not in (pivot.rows, pivot.columns)
    for each in _answers(results):
        words = [in_words(name, COLUMNS[name](each.setup)) for name in varying]
        gpu = [each.gpu.short_name] if by_gpu and each.gpu is not None else []
        title = ", ".join([*gpu, *filter(None, words)])
        place = (_placed(each, pivot.rows), _placed(each, pivot.columns))
        found.setdefault(title, {})[place] = each
    return found


def _ordered(values: Iterable[str]) -> list[str]:
    """Numbers by size, words as they came."""
    found = list(dict.fromkeys(values))
    return sorted(found, key=int) if all(each.isdecimal() for each in found) else found


def ordered_places(cells: Cells) -> tuple[list[str], list[str]]:
    """What rows and columns say: numbers by size, words as they came."""
    rows, columns = (_ordered(place[side] for place in cells) for side in (0, 1))
    return rows, columns


def pivot_lines(width: int, cells: Cells, pivot: Pivot) -> "Iterator[Text]":
    """One matrix: a heat map in colour, marks in plain text."""
    rows, columns = ordered_places(cells)
    label = Column(
        header=(f"{_AXES[pivot.rows]} \\ {_AXES[pivot.columns]}",),
        cells=tuple(rows),
        is_figure=True,
    )
    figures = []
    for column in columns:
        answers = [cells.get((row, column)) for row in rows]
        verdicts = [figure_verdict(each, pivot.figure) if each else None for each in answers]
        figures.append(
            Column(
                header=(column,),
                cells=tuple(figure_text(each, pivot.figure) if each else "" for each in answers),
                styles=tuple(HEAT_STYLES[each] if each else "" for each in verdicts),
                is_figure=True,
            )
        )
    return print_blocks(width, label, figures)


def figure_verdict(answer: Estimate, figure: Figure) -> Verdict | None:
    """The verdict that a figure is marked with: a node's own for CPU RAM, where there is one."""
    if figure is Figure.HOST and answer.host_verdict is not None:
        return answer.host_verdict
    return answer.job_verdict


def figure_text(answer: Estimate, figure: Figure) -> str:
    """One figure of an estimate, marked by the verdict."""
    text = f"{figure_bytes(answer, figure) / GIB:,.1f}"
    verdict = figure_verdict(answer, figure)
    if verdict is None:
        return text
    if figure is Figure.PEAK:
        text = deciding_text(answer) or text
    return text + (MARKS[verdict] or " ")


def figure_bytes(answer: Estimate, figure: Figure) -> int:
    """The figure a matrix shows [bytes]."""
    if figure is Figure.PEAK:
        return answer.peak_bytes
    if figure is Figure.HOST:
        return answer.host_bytes
    if figure is Figure.ACTIVATIONS:
        return answer.activations_bytes
    if figure is Figure.TEXTBOOK:
        return textbook_bytes(answer)
    high = answer.total_bytes.high
    if figure is Figure.TOTAL or answer.gpu is None:
        return high
    return answer.gpu.capacity_bytes - high


def textbook_bytes(answer: Estimate) -> int:
    """Activations of the model's layers by the textbook [bytes].

    Raises ``UnsupportedOperationError`` where no layer has attention and a feed-forward network.
    """
    from memplan.formulas.activations import layer_activation_bytes
    from memplan.report.shape import formula_shape

    shape, setup = formula_shape(answer.model), answer.setup
    return shape.num_layers * layer_activation_bytes(
        shape.hidden_size,
        num_heads=shape.num_heads,
        seq_len=setup.seq_len or 1,
        batch_size=setup.micro_batch_size,
    )
