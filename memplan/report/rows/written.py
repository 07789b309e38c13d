"""Flat rows written for scripts: one JSON document, CSV, or a GitHub-flavoured Markdown table.

All three carry the same rows under the same names in the same order; bytes are integers, an unknown
value is ``null`` in JSON and empty elsewhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memplan.report.rows.documents import document
from memplan.text import in_markdown, one_line
from memplan.units import GIB

Row = Mapping[str, object]

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""What makes a spreadsheet take a cell's text for a formula, and run it (CWE-1236)."""


def json_text(value: object, *, indent: int | None = None) -> str:
    r"""Write JSON in ASCII, which every terminal and encoding takes as it is.

    >>> json_text({"name": "\x1b\x7fé"})
    '{"name": "\\u001b\\u007f\\u00e9"}'
    """
    import json

    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def rows_json(
    rows: Iterable[Row],
    *,
    schema_version: int,
    assumptions: Sequence[str] = (),
    about: Mapping[str, str] | None = None,
    hints: Sequence[Row] | None = None,
) -> str:
    """Write ``{"schema_version", "assumptions", "rows"}``, ``about`` after the first, and ``hints``."""
    made = document(
        rows, schema_version=schema_version, assumptions=assumptions, about=about, hints=hints
    )
    return json_text(made, indent=2)


def csv_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield CSV lines, the names first; one row is held at a time."""
    import csv
    from io import StringIO

    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow([csv_cell(value) for value in row.values()])
        yield buffer.getvalue().rstrip("\n")
        buffer.seek(0)
        buffer.truncate()


def rows_csv(rows: Iterable[Row]) -> str:
    """Write all rows as CSV."""
    return "\n".join(csv_lines(rows))


def markdown_heading(name: str) -> str:
    """A column's name for people; sizes are in GiB.

    >>> markdown_heading("peak_bytes"), markdown_heading("zero_stage")
    ('peak GiB', 'zero stage')
    """
    return name.removesuffix("_bytes").replace("_", " ") + (" GiB" if is_size(name) else "")


def is_size(name: str) -> bool:
    """Whether a column holds bytes."""
    return name.endswith("_bytes")


def markdown_cell(name: str, value: object) -> str:
    """A value for people.

    >>> markdown_cell("peak_bytes", 3 * 2**29), markdown_cell("engine", "a|b")
    ('1.50', 'a\\\\|b')
    """
    if is_size(name) and isinstance(value, int):
        return f"{value / GIB:,.2f}"
    return in_markdown(cell(value))


def rows_markdown(rows: Sequence[Row], names: Sequence[str] | None = None) -> str:
    """Write a Markdown table, of all columns or of those named."""
    if not rows:
        return ""
    header = list(names or rows[0])
    heads = [markdown_heading(name) for name in header]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(header)]
    lines += [
        "| " + " | ".join(markdown_cell(name, row[name]) for name in header) + " |" for row in rows
    ]
    return "\n".join(lines)


def cell(value: object) -> str:
    """One value as text.

    >>> cell(None), cell(True), cell(["a", "b"]), cell(12)
    ('', 'true', 'a;b', '12')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return one_line(";".join(str(each) for each in value))
    return one_line(value) if isinstance(value, str) else str(value)


def csv_cell(value: object) -> str:
    """One value as text that no spreadsheet takes for a formula.

    >>> csv_cell("=1+1"), csv_cell(-1)
    ("'=1+1", '-1')
    """
    text = cell(value)
    is_number = isinstance(value, int | float)
    return f"'{text}" if text.startswith(FORMULA_STARTS) and not is_number else text
