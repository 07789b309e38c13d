"""Tables of the report as a page."""

from collections.abc import Sequence
from html import escape


def table(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    caption: str,
    last_bold: bool = False,
    markup: bool = False,
) -> str:
    """A table that scrolls by itself where the screen is narrow; figures to the right."""
    figures = {
        number for row in body for number, cell in enumerate(row) if _is_figure(cell) and number
    }
    heads = "".join(
        f'<th scope="col"{FIGURE if number in figures else ""}>{escape(cell)}</th>'
        for number, cell in enumerate(head)
    )
    rows = []
    for number, row in enumerate(body):
        total = ' class="total"' if last_bold and number == len(body) - 1 else ""
        cells = "".join(_cell(cell, markup=markup) for cell in row)
        rows.append(f"<tr{total}>{cells}</tr>")
    return (
        f"{scroll_area(caption)}<table><caption>{escape(caption)}</caption><thead><tr>{heads}"
        f"</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>\n"
    )


def scroll_area(name: str) -> str:
    """The opening of a part that scrolls by itself, for the keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'


def _cell(text: str, *, markup: bool) -> str:
    return f"<td{FIGURE if _is_figure(text) else ''}>{text if markup else escape(text)}</td>"


FIGURE = ' class="figure"'


def _is_figure(text: str) -> bool:
    return (text[:1].isdigit() or text == "-") and not any(sign in text for sign in "xΦ·")
