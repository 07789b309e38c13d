"""Two setups side by side: verdicts, what moved by component and by phase, time, money, largest batch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Phase
from memplan.report.estimates.answer import (
    gpu_answers,
    head_parts,
    needed_text,
    print_job,
    print_verdicts,
)
from memplan.report.estimates.times import (
    SOME_TOKENS,
    days_text,
    factor_text,
    gpu_hours,
    hours_text,
    money_text,
    seconds_text,
    time_factor,
    timed,
)
from memplan.report.terminal.blocks import Column, hanging, print_blocks
from memplan.units import GIB

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.estimates.times import Timed
    from memplan.report.terminal.console import Console
    from memplan.search.advice import Hints

VERSUS_SCHEMA_VERSION = 2
"""Raised when a key of a row changes its name or its meaning."""
TOLD_SHARE = 0.05
"""Of the difference, below which a component is not named in the sentence."""
HUNDREDTH = GIB // 200
"""Bytes that are rounded to nothing where two decimals of a GiB are shown."""
MISSING = "-"

Kind = TypeVar("Kind")
Figures = tuple[str, int, int]
"""A component, and its bytes in the one and the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two."""

    label: str
    """What it is called in the table."""
    name: str
    """And before its verdict."""
    answer: Estimate
    hints: "Hints | None" = None

    @property
    def largest(self) -> int | None:
        """The largest micro-batch that fits; None where it is not known, or none does."""
        answer = self.answer
        if self.hints is None or answer.gpu is None:
            return None
        return self.hints.largest.get((0, answer.gpu.gpu_id))


Sides = tuple[Side, Side]


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


def phase_figures(one: Estimate, other: Estimate) -> list[Figures]:
    """The peak of each phase that either has [bytes]."""
    first, second = one.phases, other.phases
    return [
        (
            name,
            first[name].peak_bytes if name in first else 0,
            second[name].peak_bytes if name in second else 0,
        )
        for name in dict.fromkeys((*first, *second))
    ]


def versus_rows(sides: Sides, question: "TimeQuestion") -> list[dict[str, object]]:
    """A row for each component, sum and phase, and for what else is told, for scripts."""
    one, other = (side.answer for side in sides)
    figures = [
        *(("component", *each) for each in component_figures(one, other)),
        *(("sum", *each) for each in summed_figures(one, other)),
        *(("phase", *each) for each in phase_figures(one, other)),
    ]
    rows: list[dict[str, object]] = [
        {"kind": kind, "name": name, "unit": "bytes", "first": first, "second": second,
         "difference": second - first}
        for kind, name, first, second in figures
    ]  # fmt: skip
    texts: list[tuple[str, str, Sequence[object]]] = [
        ("label", "text", [side.label for side in sides]),
        ("deciding_phase", "phase", [one.deciding_phase, other.deciding_phase]),
        ("verdict", "verdict", [side.answer.verdict for side in sides]),
        ("largest_micro_batch", "sequences", [side.largest for side in sides]),
    ]
    for name, unit, values in texts + _time_values([timed(one, question), timed(other, question)]):
        first, second = values
        both = isinstance(first, int | float) and isinstance(second, int | float)
        rows.append(
            {"kind": "answer", "name": name, "unit": unit, "first": first, "second": second,
             "difference": second - first if both else None}  # type: ignore[operator]
        )  # fmt: skip
    return rows


def _texts(found: Sequence[Kind | None], words: Callable[[Kind], str]) -> list[str]:
    return [MISSING if each is None else words(each) for each in found]


def _values(
    found: Sequence[Kind | None], value: Callable[[Kind], float | None]
) -> list[float | None]:
    return [None if each is None else value(each) for each in found]


def _time_values(found: Sequence["Timed"]) -> list[tuple[str, str, Sequence[object]]]:
    times, runs = [each.time for each in found], [each.run for each in found]
    values: list[tuple[str, str, Sequence[object]]] = [
        ("step_s", "s", _values(times, lambda each: float(f"{each.expected_s:.5g}"))),
        ("tokens_per_s", "tokens/s", _values(times, lambda each: round(each.tokens_per_s))),
        ("gpu_hours_per_1b_tokens", "h", _values(times, lambda each: round(gpu_hours(each), 2))),
    ]
    if any(runs):
        values += [
            ("run_days", "days", _values(runs, lambda each: round(each.days, 3))),
            ("gpu_hours", "h", _values(runs, lambda each: round(each.gpu_hours, 1))),
            ("cost", "price", _values(runs, lambda each: each.cost)),
        ]
    return values


def print_versus(console: "Console", sides: Sides, question: "TimeQuestion") -> None:
    """Print both verdicts, what moved in a sentence, and the figures side by side."""
    from memplan.report.terminal.console import Text

    one, other = (side.answer for side in sides)
    answers = [gpu_answers([[side.answer]], side.hints)[0] for side in sides]
    widest = max(len(side.name) for side in sides)
    names = [
        f"{side.name.ljust(widest)}  {answer.gpu.short_name}"
        for side, answer in zip(sides, answers, strict=True)
    ]
    print_verdicts(console, answers, names, with_advice=False)
    for text in hanging(difference_text(one, other, sides[1].label), console.width):
        console.print(Text(text))
    parts = head_parts([[one]])
    console.print(Text(""))
    print_job(console, parts)
    if (others := head_parts([[other]])) != parts:
        print_job(console, others)
    for table in (_byte_columns(sides), _answer_columns(sides, question)):
        console.print()
        for line in print_blocks(console.width, *table):
            console.print(line, soft_wrap=True)
    notes = dict.fromkeys(
        (*one.all_notes, *one.left_out_notes, *other.all_notes, *other.left_out_notes)
    )
    for text in ("GiB = 2^30 bytes, components at the moment that decides", *notes):
        for each in hanging(text, console.width):
            console.print(Text(each, style="dim"))


def _byte_columns(sides: Sides) -> tuple[Column, list[Column]]:
    """Components, their sums and each phase down; the one, the other, and by how much they differ."""
    one, other = (side.answer for side in sides)
    parts = component_figures(one, other)
    sums, phases = summed_figures(one, other), phase_figures(one, other)
    parts = [each for each in parts if max(each[1:]) >= HUNDREDTH]
    figures = [*parts, *sums, *((f"peak of {each[0]}", each[1], each[2]) for each in phases)]
    styles = ("",) * len(parts) + ("bold",) * len(sums) + ("",) * len(phases)
    label = Column(
        header=("GiB",),
        cells=tuple(name.replace("_", " ") for name, *_ in figures),
        styles=styles,
    )
    headers = ((sides[0].label, one.deciding_phase), (sides[1].label, other.deciding_phase))
    sizes = ([figure[1] for figure in figures], [figure[2] for figure in figures])
    columns = [
        Column(header=header, cells=tuple(map(_gib, column)), styles=styles, is_figure=True)
        for header, column in zip(headers, sizes, strict=True)
    ]
    more = tuple(_gib(second - first, sign="+") for _, first, second in figures)
    return label, [*columns, Column(header=("more", ""), cells=more, styles=styles, is_figure=True)]


def _gib(size: int, *, sign: str = "") -> str:
    return f"{size / GIB:{sign},.2f}" if abs(size) >= HUNDREDTH else ""


def _answer_columns(sides: Sides, question: "TimeQuestion") -> tuple[Column, list[Column]]:
    """What a reader decides by: the verdict, the largest batch, time and money."""
    found = [timed(side.answer, question) for side in sides]
    times, runs = [each.time for each in found], [each.run for each in found]
    rows: dict[str, list[str]] = {
        "verdict": [str(side.answer.verdict or MISSING) for side in sides],
        "largest micro-batch": [str(side.largest or MISSING) for side in sides],
        "a step": _texts(times, lambda each: seconds_text(each.expected_s)),
        "tokens/s of all GPUs": _texts(times, lambda each: f"{each.tokens_per_s:,.0f}"),
        f"GPU-hours for {SOME_TOKENS}": _texts(times, lambda each: f"{gpu_hours(each):,.1f}"),
    }
    if any(runs):
        rows["the run"] = _texts(runs, lambda each: days_text(each.expected_s))
        rows["its GPU-hours"] = _texts(runs, lambda each: hours_text(each.gpu_hours))
        costs = [None if each is None else each.cost for each in runs]
        if any(cost is not None for cost in costs):
            rows["its cost"] = _texts(costs, money_text)
    label = Column(header=("",), cells=tuple(rows))
    return label, [
        Column(
            header=(side.label,),
            cells=tuple(values[number] for values in rows.values()),
            is_figure=True,
        )
        for number, side in enumerate(sides)
    ]


def difference_text(one: Estimate, other: Estimate, label: str) -> str:
    """``--seq-len 1024 needs 5.3 GiB less: activations 4.1 GiB less; tokens then come ...``."""
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
    if len(told) > MOST_TOLD:
        told = [*told[: MOST_TOLD - 1], f"{len(told) - MOST_TOLD + 1} more"]
    why = f": {', '.join(told)}" if told else ""
    factor = time_factor(one, other)
    speed = f"; {factor_text(factor)}" if factor is not None else ""
    return f"{label} needs {_less_or_more(total)}, {range_text}{why}{speed}"


def _less_or_more(num_bytes: int) -> str:
    size = abs(num_bytes) / GIB
    if size < LEAST_SAID:
        return "as much"
    decimals = 1 if size >= LEAST_TENTH else 2
    return f"{size:,.{decimals}f} GiB {'less' if num_bytes < 0 else 'more'}"


LEAST_SAID = 0.005
"""GiB below which two decimals say nothing."""
MOST_TOLD = 4
"""Components of which a sentence says what moved."""
LEAST_TENTH = 0.095
"""GiB from which a sentence has one decimal, as what is needed has."""
