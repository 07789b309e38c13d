"""A lesson on one operation, printed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.report.lessons.teaching import USUAL, Lesson, SavedStep, Sizes, Taught, teach
from memplan.report.terminal.narrow import print_table
from memplan.units import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console


def print_lesson(console: "Console", lesson: Lesson, sizes: Sizes = USUAL) -> None:
    """Print what each way to run the operation keeps, then why."""
    from rich.text import Text

    taught = [teach(variant, sizes) for variant in lesson.variants]
    kept = [
        f"{size_text(each.kept_bytes)}{f' ({each.variant.name})' if len(taught) > 1 else ''}"
        for each in taught
    ]
    console.print(Text.assemble((lesson.name, "bold"), f" keeps {' or '.join(kept)}"))
    if all(each.variant.name != lesson.title for each in taught) or len(taught) == 1:
        console.print(Text(lesson.title))
    console.print(Text(sizes_words(lesson, sizes), style="dim"))
    for each in taught:
        print_table(console, _table(each, each.variant.name if len(taught) > 1 else None))
    for line in conclusions(lesson, taught):
        console.print(Text(line))
    console.print(Text(f"Source: {lesson.source}", style="dim"))


def sizes_words(lesson: Lesson, sizes: Sizes) -> str:
    """What a lesson is about: its own sizes, unless a tensor's were given."""
    return str(sizes) if sizes.of_shape else lesson.fixed_sizes or str(sizes)


def print_operators(console: "Console", sizes: Sizes = USUAL) -> None:
    """Print what every function of the table keeps."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"tensors of {sizes.hidden_numel:,} numbers", style="dim"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("function", overflow="fold")
    table.add_column("keeps", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for row in operator_rows(sizes):
        kept = int(str(row["bytes"]))
        name, words = str(row["operation"]), str(row["variant"])
        told = words if name in words else f"{name}: {words}"
        table.add_row(told, size_text(kept) if kept else "-", str(row["keeps"]))
    print_table(console, table)
    console.print(Text("One of them in full: memplan explain --operation NAME.", style="dim"))


def operator_rows(sizes: Sizes = USUAL) -> list[dict[str, object]]:
    """Flat rows: what each function of the table keeps."""
    from memplan.report.lessons.of_operators import operator_lessons, saved_words

    found = [
        (lesson, variant, teach(variant, sizes))
        for lesson in operator_lessons()
        for variant in lesson.variants
    ]
    return [
        _row(lesson, variant.name, lesson.name, saved_words(taught), taught.kept_bytes)
        for lesson, variant, taught in found
    ]


def conclusions(lesson: Lesson, taught: Sequence[Taught]) -> list[str]:
    """Why, and what the other ways save against the usual one."""
    usual, *others = taught
    lines = [lesson.why]
    lines += [
        f"{other.variant.name}: keeps {size_text(other.kept_bytes)} instead of "
        f"{size_text(usual.kept_bytes)}; at its highest {size_text(other.peak_bytes)} instead of "
        f"{size_text(usual.peak_bytes)}."
        for other in others
    ]
    return lines


def lesson_rows(lesson: Lesson, sizes: Sizes = USUAL) -> list[dict[str, object]]:
    """Flat rows: one for each thing kept, and one for each variant's sum."""
    rows: list[dict[str, object]] = []
    for variant in lesson.variants:
        taught = teach(variant, sizes)
        for step in taught.steps:
            for what, num_bytes in step.saves:
                rows.append(_row(lesson, variant.name, step.operation, what, num_bytes))
        rows.append(_row(lesson, variant.name, "", "all it keeps", taught.kept_bytes))
        forward = taught.forward_peak_bytes
        rows.append(_row(lesson, variant.name, "", "peak of forward", forward))
        rows.append(_row(lesson, variant.name, "", "peak", taught.peak_bytes))
    return rows


def _row(
    lesson: Lesson, variant: str, operation: str, keeps: str, num_bytes: int
) -> dict[str, object]:
    return {
        "lesson": lesson.name,
        "variant": variant,
        "operation": operation,
        "keeps": keeps,
        "bytes": num_bytes,
        "source": lesson.source,
    }


def _cells(step: SavedStep) -> tuple[str, str, str, str]:
    """An operation's row: its name, what it makes, what it keeps, and what that is."""
    kept = sum(num_bytes for _, num_bytes in step.saves)
    what = [
        text if num_bytes > ALLOCATION_ROUNDING else f"{text} (a number)"
        for text, num_bytes in step.saves
    ]
    if step.again_bytes:
        what.append(f"{size_text(step.again_bytes)} kept before: counted once")
    return (
        step.operation,
        size_text(step.made_bytes) if step.made_bytes else "-",
        size_text(kept) if kept else "-",
        ", ".join(dict.fromkeys(what)),
    )


def _table(taught: Taught, title: str | None) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    table.add_column("operation", no_wrap=True)
    table.add_column("makes", justify="right", no_wrap=True)
    table.add_column("keeps", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for step in taught.steps:
        table.add_row(*_cells(step))
    table.add_section()
    notes = [
        f"{size_text(beside)} beside {what}"
        for beside, what in (
            (taught.kept_beside_output_bytes, "its result"),
            (taught.kept_beside_given_bytes, GIVEN),
        )
        if beside != taught.kept_bytes
    ]
    table.add_row("kept", "", size_text(taught.kept_bytes), ", ".join(notes), style="bold")
    for name, size, words in (
        ("forward", taught.forward_peak_bytes, "the most at once, no weights"),
        ("peak", taught.peak_bytes, "with backward"),
    ):
        words += f"; {GIVEN} apart {size_text(size - taught.given_bytes)}"
        table.add_row(name, size_text(size), "", words, style="dim")
    return table


GIVEN = "its input"
