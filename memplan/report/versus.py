"""Two setups side by side, component by component: why one needs more than the other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.memory.account import ComponentKind, Phase
from memplan.report.answer import needed_text, print_answer
from memplan.report.blocks import Column, print_blocks
from memplan.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

    from memplan.search.advice import Hints

VERSUS_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""
TOLD_SHARE = 0.05
"""Of the difference, below which a component is not named in the sentence."""
HUNDREDTH = GIB // 200
"""Bytes that are rounded to nothing where two decimals of a GiB are shown."""

Figures = tuple[str, int, int]
"""A component, and its bytes in the one and the other."""


def component_figures(one: Estimate, other: Estimate) -> list[Figures]:
    """What each holds at its own fullest moment, by component [bytes]."""
    first, second = deciding(one).components, deciding(other).components
    return [
        (kind.label, first.get(kind.label, 0), second.get(kind.label, 0))
        for kind in ComponentKind
        if kind.label in first or kind.label in second
    ]


def deciding(answer: Estimate) -> Phase:
    """The phase that the verdict rests on."""
    return answer.phases[answer.deciding_phase]


def summed_figures(one: Estimate, other: Estimate) -> list[Figures]:
    """What that adds up to, what the allocator needs besides, and with all that lies beside it."""
    return [
        ("allocated", one.worst_bytes, other.worst_bytes),
        (
            "allocator's rest",
            one.required_bytes - one.worst_bytes,
            other.required_bytes - other.worst_bytes,
        ),
        ("context and NCCL, at most", one.overhead_bytes.high, other.overhead_bytes.high),
        ("needed, at most", one.total_bytes.high, other.total_bytes.high),
    ]


def versus_rows(one: Estimate, other: Estimate) -> list[dict[str, object]]:
    """A row for each component and each sum, for scripts; phases are those that decide."""
    figures = component_figures(one, other) + summed_figures(one, other)
    return [
        {
            "component": name,
            "phase": one.deciding_phase,
            "bytes": first,
            "versus_phase": other.deciding_phase,
            "versus_bytes": second,
            "difference_bytes": second - first,
        }
        for name, first, second in figures
    ]


def print_versus(
    console: "Console", answers: Sequence[tuple[Estimate, "Hints"]], options: str
) -> None:
    """Print the answer of both, what each component takes, and a sentence on the difference."""
    from rich.text import Text

    for answer, hints in answers:
        print_answer(console, [[answer]], hints)
    (one, _), (other, _) = answers
    console.print()
    for line in print_blocks(console.width, *versus_columns(one, other, options)):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(Text(difference_text(one, other, options)))
    lines = (
        (
            "GiB = 2^30 bytes, each at the moment that decides. The allocator's rest: what it must have "
            "beyond what is handed out"
        ),
        *dict.fromkeys((*one.left_out_notes, *other.left_out_notes)),
    )
    for each in lines:
        console.print(Text(each, style="dim"))


def versus_columns(one: Estimate, other: Estimate, options: str) -> tuple[Column, list[Column]]:
    """Components down; the one, the other, and by how much they differ."""
    parts, sums = component_figures(one, other), summed_figures(one, other)
    figures = parts + sums
    styles = ("",) * len(parts) + ("bold",) * len(sums)
    label = Column(
        header=("GiB",),
        cells=tuple(name.replace("_", " ") for name, _, _ in figures),
        styles=styles,
    )
    headers = (("as given", one.deciding_phase), (options, other.deciding_phase), ("more", ""))
    sizes = zip(*((first, second, second - first) for _, first, second in figures), strict=True)
    columns = []
    for header, column in zip(headers, sizes, strict=True):
        sign = "+" if header[0] == "more" else ""
        cells = tuple(
            f"{size / GIB:{sign},.2f}" if abs(size) >= HUNDREDTH else "" for size in column
        )
        columns.append(Column(header=header, cells=cells, styles=styles, is_figure=True))
    return label, columns


def difference_text(one: Estimate, other: Estimate, options: str) -> str:
    """``--seq-len 1024 needs 5.30 GiB less: activations 4.12 less, logits and loss 1.18 less``."""
    total = other.total_bytes.low - one.total_bytes.low
    parts = sorted(
        ((second - first, name) for name, first, second in component_figures(one, other)),
        key=lambda part: -abs(part[0]),
    )
    largest = max((abs(size) for size, _ in parts), default=0)
    told = [
        f"{name.replace('_', ' ')} {_less_or_more(size)}"
        for size, name in parts
        if abs(size) > TOLD_SHARE * largest
    ]
    range_text = f"{needed_text(other.total_bytes)} instead of {needed_text(one.total_bytes)} GiB"
    why = f": {', '.join(told)}" if told else ""
    return f"{options} needs {_less_or_more(total)}, {range_text}{why}"


def _less_or_more(num_bytes: int) -> str:
    return f"{abs(num_bytes) / GIB:,.2f} GiB {'less' if num_bytes < 0 else 'more'}"
