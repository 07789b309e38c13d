"""Every key of a training stack's files, and what is done with it."""

from memplan.sources.key_tables import Fate, KeyTable, key_table
from memplan.sources.stacks import STACKS

_TITLES = {
    Fate.READ: "used",
    Fate.QUIET: "no effect on memory",
    Fate.LEFT_OUT: "not counted, and named in the answer (which is then never FITS)",
    Fate.UPPER: "not modelled: the figures are upper bounds, and the answer says so",
    Fate.REFUSED: "refused because not modelled",
}


def document() -> str:
    """All of them, as Markdown."""
    tables = [key_table(stack) for stack in (*STACKS, "training_arguments")]
    return "\n\n".join(_section(table) for table in tables if table.fates)


def _section(table: KeyTable) -> str:
    more = " Training arguments may stand among them." if table.arguments else ""
    lines = [f"## {table.source}", "", *([more.strip(), ""] if more else [])]
    for fate, title in _TITLES.items():
        names = [name for name, its in table.fates.items() if its is fate]
        if names:
            lines += [f"**{title}**: {', '.join(_said(table, name, fate) for name in names)}.", ""]
    older = [
        f"`{old}` ({f'`{new}` today' if new else 'gone'})" for old, new in table.renamed.items()
    ]
    if older:
        lines += [f"**older spellings**: {', '.join(older)}."]
    return "\n".join(lines).rstrip()


def _said(table: KeyTable, name: str, fate: Fate) -> str:
    words = "" if fate in (Fate.READ, Fate.QUIET) else f" ({table.text(name, fate)})"
    return f"`{name}`{words}"
