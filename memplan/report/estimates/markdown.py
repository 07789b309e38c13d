"""An estimate as Markdown, for a pull request or a page: the answer, the figures, the assumptions."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.report.estimates.account import account_columns, host_lines
from memplan.report.estimates.answer import GpuAnswer, Rows, gpu_answers, head_parts, needed_text
from memplan.report.estimates.assumed import common_assumptions, notes, precision_lines
from memplan.report.estimates.changes import setup_label
from memplan.report.estimates.columns import kernel_groups
from memplan.report.estimates.printed import comparison_columns, meaning_lines
from memplan.report.terminal.blocks import Column
from memplan.search.advice import Hints
from memplan.text import in_markdown
from memplan.units import format_gib

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion


def estimate_markdown(
    rows: Rows,
    hints: Hints,
    *,
    everywhere: bool,
    version: str,
    question: "TimeQuestion | None" = None,
) -> str:
    """The whole page; rows are the simplest first. With times where they are asked for."""
    return "\n".join(_lines(rows, hints, everywhere=everywhere, version=version, question=question))


def _lines(
    rows: Rows, hints: Hints, *, everywhere: bool, version: str, question: "TimeQuestion | None"
) -> Iterator[str]:
    name, *rest = (in_markdown(part) for part in head_parts(rows))
    yield f"## {name}"
    yield ""
    yield " · ".join(rest)
    yield ""
    for answer in gpu_answers(rows, hints):
        yield from _answer_lines(answer)
    yield ""
    if len(rows) > 1:
        yield "### Setups, simplest first"
        yield ""
        yield from table_lines(comparison_columns(rows, hints, everywhere=everywhere))
    else:
        yield "### Where the bytes are"
        for group in kernel_groups(rows[0]):
            yield ""
            yield from table_lines(account_columns(group[0], _cards(group, rows[0])))
        for line in host_lines(rows[0]):
            yield f"\n{in_markdown(line)}"
    yield ""
    if question is not None:
        yield from _time_lines(rows, question)
    yield "### Assumptions"
    yield ""
    assumed = common_assumptions(rows)
    of_model = [text for text in rows[0][0].model.assumptions if text not in assumed]
    for text in (*of_model, *assumed, *precision_lines(rows), *notes(rows)):
        yield f"* {in_markdown(text)}"
    yield ""
    for text in meaning_lines():
        yield f"{in_markdown(text)} "
    yield f"Made by memplan {version}."


def _time_lines(rows: Rows, question: "TimeQuestion") -> Iterator[str]:
    from memplan.report.estimates.times import (  # which most are not asked for
        run_text,
        time_lines,
        timed,
    )

    yield "### Time"
    yield ""
    for each in (each for row in rows for each in row):
        first, *others = time_lines(each, question)
        yield f"* {in_markdown(setup_label(each.setup))}: {in_markdown(first)}"
        run = timed(each, question).run
        runs = [] if run is None else [run_text(run, question)]
        yield from (f"  * {in_markdown(text)}" for text in (*runs, *others))
    yield ""


def _answer_lines(answer: GpuAnswer) -> Iterator[str]:
    """The verdict on a GPU in a sentence, and what would change it."""
    gpu = answer.gpu
    needs = f"needs {needed_text(answer.needed)} of {format_gib(gpu.capacity_bytes, digits=1)}"
    batch = f", micro-batch at most {answer.largest}" if answer.largest else ""
    yield f"* **{in_markdown(gpu.short_name)}: {in_markdown(answer.words)}**, {needs}{batch}"
    if answer.advice:
        yield f"  * {in_markdown(answer.advice)}"


def _cards(group: Sequence[Estimate], row: Sequence[Estimate]) -> str:
    """The GPUs that a table is of, where there are others."""
    if len(group) == len(row):
        return ""
    return " and ".join(each.gpu.short_name for each in group if each.gpu is not None)


def table_lines(columns: Sequence[Column]) -> Iterator[str]:
    """A GitHub-flavoured table; figures are set to the right."""
    heads = [in_markdown(" ".join(filter(None, column.header))) for column in columns]
    yield _row(heads)
    yield "|" + "|".join(" ---: " if column.is_figure else " --- " for column in columns) + "|"
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield _row(["<br>".join(in_markdown(line) for line in cell.split("\n")) for cell in cells])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
