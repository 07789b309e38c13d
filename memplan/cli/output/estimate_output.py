"""Writing what ``memplan estimate`` found: for people, and for scripts."""

from typing import TYPE_CHECKING

from memplan.cli.output.terminal import say
from memplan.options.rows.shared import OutputFormat
from memplan.options.table import Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.estimator import Estimate
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.search.advice import Hints
    from memplan.search.planning.concessions import Concession


def show_ranks(rows: "list[list[Estimate]]", output_format: OutputFormat) -> None:
    """Write every distinct rank of the rows."""
    from memplan.report.ranks import MARKDOWN_COLUMNS, print_ranks, rank_rows

    if output_format is not OutputFormat.TABLE:
        flat = list(rank_rows([each for row in rows for each in row]))
        _write_flat(flat, rows, output_format, MARKDOWN_COLUMNS)
        return
    from memplan.report.terminal.console import TerminalConsole

    print_ranks(TerminalConsole(), rows)


def _write_flat(
    flat: "list[dict[str, object]]",
    rows: "Sequence[Sequence[Estimate]]",
    output_format: OutputFormat,
    markdown_columns: tuple[str, ...],
    *,
    hints: "list[dict[str, object]] | None" = None,
) -> None:
    """Write flat rows in a format for scripts, with what was assumed for any of them."""
    from memplan.cli.output.checking import about
    from memplan.estimator.estimate import SCHEMA_VERSION
    from memplan.report.rows.written import rows_csv, rows_json, rows_markdown

    if output_format is OutputFormat.JSON:
        said = (text for row in rows for each in row for text in (*each.assumptions, *each.notes))
        say(
            rows_json(
                flat,
                schema_version=SCHEMA_VERSION,
                assumptions=list(dict.fromkeys(said)),
                about=about(rows[0][0].model),
                hints=hints,
            )
        )
    elif output_format is OutputFormat.CSV:
        say(rows_csv(flat))
    else:
        say(rows_markdown(flat, markdown_columns))


def show(rows: "Sequence[Sequence[Estimate]]", values: Values, *, everywhere: bool) -> None:
    """Write the rows as the options say; ``everywhere``: look for the largest micro-batch of each, on each GPU."""
    from memplan.options.axes import read_concessions
    from memplan.options.run_times import time_question, with_measured_step

    answers = [each for row in rows for each in row]
    output_format = values["format"]
    question = with_measured_step(answers, values, time_question(values))
    if question is not None and values.get("save_calibration") is not None:
        _save_calibration(question, values["save_calibration"])
    allow = read_concessions(values["allow"])
    if output_format is OutputFormat.TABLE:
        _show_table(rows, values, everywhere=everywhere, question=question, allow=allow)
    elif output_format is OutputFormat.MARKDOWN:
        _show_markdown(rows, everywhere=everywhere, question=question, allow=allow)
        if values["lifetimes"]:
            _say_lifetimes(rows)
    else:
        from memplan.report.rows.hints import hint_rows
        from memplan.search.advice import hints_for

        hints = hints_for(rows[0][0].model, rows, allow=allow)
        flat = _flat(rows, hints, question, lifetimes=values["lifetimes"])
        _write_flat(flat, rows, output_format, (), hints=hint_rows(rows, hints))


def _save_calibration(question: "TimeQuestion", path: str) -> None:
    from datetime import UTC, datetime
    from pathlib import Path

    from memplan.cli.output.terminal import write_file
    from memplan.sources.cards.calibration_file import calibration_text

    assert question.site.calibration is not None
    text = calibration_text(question.site.calibration, date=datetime.now(UTC).date().isoformat())
    write_file(Path(path), text, option="--save-calibration")


def _flat(
    rows: "Sequence[Sequence[Estimate]]",
    hints: "Hints",
    question: "TimeQuestion | None",
    *,
    lifetimes: bool,
) -> "list[dict[str, object]]":
    """A row for each answer, with its time and lifetimes where they are asked for."""
    from memplan.report.rows.hints import hinted_rows

    answers = [each for row in rows for each in row]
    flat = hinted_rows(rows, hints)
    if question is not None:
        from memplan.report.estimates.times import time_row

        flat = [own | time_row(each, question) for own, each in zip(flat, answers, strict=True)]
    if lifetimes:
        from memplan.report.estimates.lifetimes import lifetime_row

        flat = [own | lifetime_row(each) for own, each in zip(flat, answers, strict=True)]
    return flat


def _show_table(
    rows: "Sequence[Sequence[Estimate]]",
    values: Values,
    *,
    everywhere: bool,
    question: "TimeQuestion | None",
    allow: "Sequence[Concession]",
) -> None:
    from memplan.report.estimates.answer import best_places, simplest_first
    from memplan.report.estimates.printed import Shown, print_account, print_comparison
    from memplan.report.terminal.console import TerminalConsole
    from memplan.search.advice import hints_for

    console = TerminalConsole()
    rows = simplest_first(rows)
    # Where no GPU is named there are three, and to search every row would take longer than the
    # table itself.
    places = None if everywhere else best_places(rows)
    hints = hints_for(rows[0][0].model, rows, places, allow=allow)
    named = ("legend", "assumptions", "reserved", "lifetimes")
    shown = Shown(
        everywhere=everywhere, question=question, **{name: values[name] for name in named}
    )
    if len(rows) == 1:
        print_account(console, rows[0], hints, shown)
    else:
        print_comparison(console, rows, hints, shown)


def _say_lifetimes(rows: "Sequence[Sequence[Estimate]]") -> None:
    """A line for each setup, as the list of its times is."""
    from memplan.report.estimates.changes import setup_label
    from memplan.report.estimates.columns import plain_gib
    from memplan.report.estimates.lifetimes import lifetime_bytes

    say("")
    for row in rows:
        found = lifetime_bytes(row[0])
        sizes = ", ".join(f"{each.value} {plain_gib(size)} GiB" for each, size in found.items())
        say(f"* {setup_label(row[0].setup)}: {sizes} at the peak")


def _show_markdown(
    rows: "Sequence[Sequence[Estimate]]",
    *,
    everywhere: bool,
    question: "TimeQuestion | None",
    allow: "Sequence[Concession]",
) -> None:
    """Write the answer for people who read it elsewhere."""
    from memplan import __version__
    from memplan.report.estimates.answer import best_places, simplest_first
    from memplan.report.estimates.markdown import estimate_markdown
    from memplan.search.advice import hints_for

    rows = simplest_first(rows)
    places = None if everywhere else best_places(rows)
    hints = hints_for(rows[0][0].model, rows, places, allow=allow)
    say(
        estimate_markdown(
            rows, hints, everywhere=everywhere, version=__version__, question=question
        )
    )
