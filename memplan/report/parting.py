"""Where a recorded run and its prediction part, as people and as scripts read it."""

from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.snapshots.parting import Level, LoneBlocks, Parting, SizeClass
from memplan.report.estimates.changes import setup_label
from memplan.report.rows.written import Row
from memplan.report.terminal.narrow import print_table
from memplan.units import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

PARTING_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""
NUM_SIZES, NUM_PLACES = 12, 16
"""Lines that a terminal shows of each list."""


def parting_rows(parting: Parting) -> list[Row]:
    """Every figure of the comparison, one a row."""
    rows = [_level_row("peak", level) for level in parting.peaks]
    rows += [_level_row("phase", level) for level in parting.parts]
    rows += [_size_row(each) for each in parting.size_classes]
    rows += [_lone_row(each) for each in parting.lone_blocks]
    return rows


def _row(
    part: str,
    name: str,
    *,
    block_bytes: int | None,
    counts: tuple[int | None, int | None],
    totals: tuple[int | None, int | None],
) -> Row:
    return {
        "part": part,
        "name": name,
        "block_bytes": block_bytes,
        "predicted_count": counts[0],
        "recorded_count": counts[1],
        "predicted_bytes": totals[0],
        "recorded_bytes": totals[1],
    }


def _level_row(part: str, level: Level) -> Row:
    totals = level.predicted_bytes, level.recorded_bytes
    return _row(part, level.name, block_bytes=None, counts=(None, None), totals=totals)


def _size_row(each: SizeClass) -> Row:
    counts = each.num_predicted, each.num_recorded
    totals = each.num_predicted * each.num_bytes, each.num_recorded * each.num_bytes
    return _row("size", "", block_bytes=each.num_bytes, counts=counts, totals=totals)


def _lone_row(each: LoneBlocks) -> Row:
    counts = (0, each.count) if each.recorded else (each.count, 0)
    totals = (0, each.total_bytes) if each.recorded else (each.total_bytes, 0)
    return _row("only", each.place, block_bytes=each.num_bytes, counts=counts, totals=totals)


def print_parting(console: "Console", found: Estimate, parting: Parting, *, source: str) -> None:
    """Print both sides' peaks, the sizes that differ, and the blocks that only one side holds."""
    from rich.text import Text

    recorded = parting.recorded
    head = f", {setup_label(found.setup)}: predicted, and recorded in {source}"
    console.print(Text.assemble((found.model.name, "bold"), head))
    told = f"GPU {recorded.device} of the snapshot, {recorded.num_events:,} events"
    if recorded.earlier_bytes:
        told += f"; {size_text(recorded.earlier_bytes)} were there before the recording began"
    console.print(Text(told, style="dim"))
    console.print()
    print_table(console, _level_table(parting))
    differing = [each for each in parting.size_classes if each.surplus_bytes]
    if differing:
        print_table(console, _size_table(differing))
        print_table(console, _lone_table(parting.lone_blocks))
    else:
        console.print(Text("Both sides hold the same blocks at their fullest moments."))
    for line in footnotes(parting):
        console.print(Text(line, style="dim"))


def footnotes(parting: Parting) -> list[str]:
    """How the figures are to be read."""
    counted = (
        f"Blocks count as they were asked for, rounded up to {ALLOCATION_ROUNDING} bytes; what the "
        "allocator hands out beyond that is part of what it reserves."
    )
    lines = [counted]
    if not parting.parts:
        lines.append("The snapshot has no stacks (context=None), so phases are not told apart.")
    return lines


def _level_table(parting: Parting) -> "Table":
    table = _table("The most that was held", "", "predicted", "recorded", "difference")
    for level in parting.peaks:
        table.add_row(level.name, *_both(level.predicted_bytes, level.recorded_bytes))
    for level in parting.parts:
        table.add_row(f"  in {level.name}", *_both(level.predicted_bytes, level.recorded_bytes))
    return table


def _both(predicted: int | None, recorded: int | None) -> tuple[str, str, str]:
    difference = ""
    if predicted is not None and recorded is not None:
        difference = _signed(recorded - predicted)
        if predicted:
            difference += f" ({100 * (recorded - predicted) / predicted:+.2f} %)"
    return _shown(predicted), _shown(recorded), difference


def _shown(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else size_text(num_bytes)


def _signed(num_bytes: int) -> str:
    if not num_bytes:
        return "0"
    return f"{'+' if num_bytes > 0 else '-'}{size_text(abs(num_bytes))}"


def _size_table(differing: list[SizeClass]) -> "Table":
    title = "Blocks alive at the fullest moment, by size"
    table = _table(title, "block", "predicted", "recorded", "difference")
    for each in differing[:NUM_SIZES]:
        table.add_row(
            size_text(each.num_bytes),
            f"{each.num_predicted:,}",
            f"{each.num_recorded:,}",
            _signed(each.surplus_bytes),
        )
    rest = differing[NUM_SIZES:]
    if rest:
        total = sum(each.surplus_bytes for each in rest)
        table.add_row(f"{len(rest)} more sizes", "", "", _signed(total), style="dim")
    return table


def _lone_table(found: tuple[LoneBlocks, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left",
        title="The largest blocks that only one side holds", title_style="bold",
    )  # fmt: skip
    table.add_column("only in", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("made at", overflow="fold")
    for each in found[:NUM_PLACES]:
        table.add_row(
            "recorded" if each.recorded else "predicted",
            size_text(each.total_bytes),
            f"{each.count:,} x {size_text(each.num_bytes)}",
            Text(each.place),
        )
    rest = found[NUM_PLACES:]
    if rest:
        total = size_text(sum(each.total_bytes for each in rest))
        table.add_row("", total, "", f"{len(rest)} more places, on both sides", style="dim")
    return table


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left",
        title=title, title_style="bold",
    )  # fmt: skip
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table
