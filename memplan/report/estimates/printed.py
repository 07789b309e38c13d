"""An estimate as people read it: the answer first, then setups side by side, or one account."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.fast_dataclass import dataclass, replace
from memplan.memory.engine_options import loads_under_zero_init
from memplan.report.estimates.account import (
    account_columns,
    beside_lines,
    host_lines,
    reserved_lines,
)
from memplan.report.estimates.answer import Rows, gpu_answers, print_answer
from memplan.report.estimates.assumed import (
    notes,
    precision_lines,
    print_assumed,
    print_dim,
    print_notes,
    print_plain,
)
from memplan.report.estimates.columns import (
    allocated_column,
    card_column,
    host_column,
    kernel_groups,
    phase_column,
    reserved_column,
    setup_lines,
    short_names,
    size_columns,
)
from memplan.report.terminal.blocks import Column, print_blocks

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.terminal.console import Console
    from memplan.search.advice import Hints


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What is shown of an answer besides."""

    everywhere: bool = True
    """What each setup needs of each GPU, and the largest micro-batch there."""
    legend: bool = False
    assumptions: bool = False
    reserved: bool = False
    lifetimes: bool = False
    question: "TimeQuestion | None" = None
    """The time of each, which a single setup for people is told in any case."""


USUALLY_SHOWN = Shown()


def print_comparison(
    console: "Console", rows: Rows, hints: "Hints | None" = None, shown: Shown = USUALLY_SHOWN
) -> None:
    """Print the answer for each GPU, then one line per setup, the simplest first.

    Each row holds the same setup on every GPU asked for; ``hints`` count the rows as they stand.
    """
    print_answer(console, rows, hints, shown.question)
    console.print()
    label, *others = comparison_columns(
        rows, hints, everywhere=shown.everywhere, reserved=shown.reserved
    )
    if shown.question is not None:
        others += times_by_card(_answers_by_card(rows), len(label.cells), shown.question)
    if shown.lifetimes:
        from memplan.report.estimates.lifetimes import lifetime_columns

        others += lifetime_columns([line.first for line in setup_lines(rows)])
    for line in print_blocks(console.width, label, others):
        console.print(line, soft_wrap=True)
    console.print()
    print_assumed(console, rows, everything=shown.assumptions)
    print_notes(console, rows, everything=shown.assumptions)
    for text in beside_lines([each.chosen for each in gpu_answers(rows)], named=len(rows) > 1):
        print_dim(console, text)
    zero_init = any(loads_under_zero_init(row[0].setup) for row in rows)
    _print_words(console, SHORT_LEGEND, legend=shown.legend, zero_init=zero_init)
    if shown.reserved:
        print_dim(console, RESERVED_LINE)
    if shown.lifetimes:
        from memplan.report.estimates.lifetimes import lifetime_words

        for text in lifetime_words():
            print_dim(console, text)


def print_account(
    console: "Console",
    estimates: Sequence[Estimate],
    hints: "Hints | None" = None,
    shown: Shown = USUALLY_SHOWN,
) -> None:
    """Print the verdict on every GPU, then one setup's bytes by component and phase."""
    print_answer(console, [estimates], hints, shown.question)
    from memplan.report.estimates.times import speed_lines, time_lines  # which tables do without

    if shown.question is not None:
        console.print()
        for each in estimates:
            for text in time_lines(each, shown.question):
                print_plain(console, text)
    _print_bytes(console, estimates, lifetimes=shown.lifetimes)
    console.print()
    for text in host_lines(estimates):
        print_plain(console, text)
    for each in estimates if shown.question is None else ():
        for text in speed_lines(each):
            print_plain(console, text)
    print_assumed(console, [estimates], everything=shown.assumptions)
    print_notes(console, [estimates], everything=shown.assumptions)
    _print_beside(console, estimates, shown)
    _print_words(console, SHORT_ACCOUNT_LEGEND, legend=shown.legend)


def _print_bytes(console: "Console", estimates: Sequence[Estimate], *, lifetimes: bool) -> None:
    """A table by component and phase for each kernel that the cards bring."""
    groups = kernel_groups(estimates)
    for group in groups:
        console.print()
        names = short_names(group) if len(groups) > 1 else ""
        tables = [account_columns(group[0], names)]
        if lifetimes:
            from memplan.report.estimates.lifetimes import lifetime_table

            tables.append(lifetime_table(group[0]))
        for number, (label, *others) in enumerate(tables):
            if number:
                console.print()
            for line in print_blocks(console.width, label, others):
                console.print(line, soft_wrap=True)


def _print_beside(console: "Console", estimates: Sequence[Estimate], shown: Shown) -> None:
    """What comes on top of the bytes, and what the allocator makes of them."""
    for text in beside_lines(estimates):
        print_dim(console, text)
    if not shown.reserved:
        return
    for each in estimates:
        if each.gpu is not None:
            for text in reserved_lines(each, each.gpu.short_name):
                print_dim(console, text)
    print_dim(console, RESERVED_LINE)


def _answers_by_card(rows: Rows) -> list[dict[int, Estimate]]:
    """For each GPU, its answers by the line of the table that they stand on."""
    lines = list(enumerate(setup_lines(rows)))
    return [
        {
            place: line.first if gpu is None else line.held[gpu.gpu_id]
            for place, line in lines
            if gpu is None or gpu.gpu_id in line.held
        }
        for gpu in (each.gpu for each in rows[0])
    ]


def times_by_card(
    cards: Sequence[Mapping[int, Estimate]], num_lines: int, question: "TimeQuestion"
) -> list[Column]:
    """A step's time and what follows, for each GPU; empty on lines of which it has no answer."""
    from memplan.report.estimates.times import time_columns  # which most are not asked for

    found = []
    for held in cards:
        gpu = next(iter(held.values())).gpu
        name = gpu.short_name if gpu is not None and len(cards) > 1 else ""
        for each in time_columns(list(held.values()), question):
            told = dict(zip(held, each.cells, strict=True))
            cells = tuple(told.get(place, "") for place in range(num_lines))
            header = (f"{name} {each.header[0]}".strip(), *each.header[1:])
            found.append(replace(each, header=header, cells=cells))
    return found


RESERVED_LINE = (
    "reserved: what PyTorch's allocator holds on a card with room; nvidia-smi shows that, the CUDA "
    "context and NCCL"
)


def comparison_columns(
    rows: Rows, hints: "Hints | None" = None, *, everywhere: bool = True, reserved: bool = False
) -> list[Column]:
    """A column of setups, what each allocates, where and on the host, and one for each GPU.

    ``everywhere``: with what each setup needs of it. ``reserved``: and what the allocator reserves on a card with room.
    """
    lines = list(setup_lines(rows))
    largest = hints.largest if hints is not None else {}
    # Beside every verdict or beside none.
    if len(largest) < sum(len(row) for row in rows):
        largest = {}
    cards = [
        card_column(each.gpu, lines, largest=largest, with_needs=everywhere)
        for each in rows[0]
        if each.gpu is not None
    ]
    return [
        Column(header=("setup",), cells=tuple(line.label for line in lines)),
        *size_columns(lines),
        allocated_column(lines),
        *([reserved_column(lines)] if reserved else []),
        phase_column(lines),
        host_column([line.first for line in lines]),
        *cards,
    ]


SHORT_LEGEND = ("GiB = 2^30 bytes; --legend: every word; --assumptions: every default",)


SHORT_ACCOUNT_LEGEND = (
    "* decides; GiB = 2^30 bytes; --legend: every word; --assumptions: every default",
)


def footnotes(rows: Rows) -> list[str]:
    """What the reader of a report has to know, each line once."""
    return [*meaning_lines(), *precision_lines(rows), *notes(rows)]


def meaning_lines() -> list[str]:
    """What the words of the answer mean, where there is no ``--legend`` to ask for."""
    from memplan.report.terminal.legend import ANSWER_WORDS

    return [
        f"GiB = {ANSWER_WORDS['GiB']}. needs: {ANSWER_WORDS['needs']}.",
        (
            f"fits: {ANSWER_WORDS['fits']}; tight: {ANSWER_WORDS['tight']}; does not fit, OOM: "
            f"{ANSWER_WORDS['OOM, does not fit']}; states fit: {ANSWER_WORDS['states fit']}."
        ),
    ]


def _print_words(
    console: "Console", short: Sequence[str], *, legend: bool, zero_init: bool = False
) -> None:
    """Print what the words mean: a line, or all of them."""
    if not legend:
        for text in short:
            print_dim(console, text)
        return
    from memplan.report.terminal.legend import print_legend

    print_legend(console)
    if zero_init:
        print_dim(console, ZERO_INIT_LINE)


ZERO_INIT_LINE = (
    "ZeRO-3 loads under zero.Init, as transformers does; for a loop of your own without it: "
    "--engine-option zero_init=false"
)
