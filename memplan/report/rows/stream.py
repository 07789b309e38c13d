"""Rows written for scripts one by one, so that memory stays flat however many there are.

The JSON document and the CSV are those of ``memplan.report.rows.written``; in the JSON, each row is a line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from memplan.report.rows.written import csv_lines, json_text, markdown_cell, markdown_heading

Row = Mapping[str, object]


def json_document(
    rows: Iterable[Row],
    *,
    schema_version: int,
    assumptions: Callable[[], Sequence[str]],
    about: Mapping[str, str],
) -> Iterator[str]:
    """Yield the lines of ``{"schema_version", "assumptions", "rows"}``, ``about`` after the first.

    ``assumptions`` is called when the first row is there.
    """
    line = ""
    for number, row in enumerate(rows):
        if number == 0:
            yield from _opening(schema_version, about, assumptions())
        else:
            yield f"{line},"
        line = f"    {json_text(row)}"
    if line:
        yield line
    else:
        yield from _opening(schema_version, about, ())
    yield "  ]"
    yield "}"


def _opening(
    schema_version: int, about: Mapping[str, str], assumptions: Sequence[str]
) -> Iterator[str]:
    yield "{"
    yield f'  "schema_version": {schema_version},'
    for name, value in about.items():
        yield f"  {json_text(name)}: {json_text(value)},"
    yield f'  "assumptions": {json_text(list(assumptions))},'
    yield '  "rows": ['


def json_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield each row as a JSON object on a line of its own."""
    for row in rows:
        yield json_text(row)


def markdown_lines(rows: Iterable[Row], names: Sequence[str]) -> Iterator[str]:
    """Yield a GitHub-flavoured Markdown table of the columns named, sizes in GiB."""
    yield "| " + " | ".join(map(markdown_heading, names)) + " |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        yield "| " + " | ".join(markdown_cell(name, row[name]) for name in names) + " |"


__all__ = ["csv_lines", "json_document", "json_lines", "markdown_lines"]
