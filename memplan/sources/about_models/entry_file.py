"""Data files with one entry a line: an entry is read without parsing the others.

Every command looks up one model and a few config classes, so parsing the whole of both files would
be most of what those lookups cost.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from memplan.fast_dataclass import dataclass

_DATA_FOLDER = Path(__file__).parents[2] / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryFile:
    """A JSON file of the package whose ``section`` has each of its entries on a line of its own."""

    file_name: str
    """File of ``memplan/data``."""
    section: str
    """Top-level key that holds the entries."""
    indent: int
    """Blanks before an entry's name: fewer before the keys of the top level."""

    def entry(self, name: str) -> dict[str, Any] | None:
        """Return the entry of exactly this name, or None."""
        text = _read(self.file_name)
        opening = b"\n%b%b: " % (b" " * self.indent, json.dumps(name).encode())
        position = text.find(opening)
        if position < 0:
            return None
        start = position + len(opening)
        entry: dict[str, Any] = json.loads(text[start : _end_of_line(text, start)].rstrip(b",\r"))
        return entry

    def names(self) -> tuple[str, ...]:
        """Return the names of all entries, in the file's order."""
        return _names(self.file_name, self.indent)

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return all entries by name, in the file's order."""
        entries: dict[str, dict[str, Any]] = json.loads(_read(self.file_name))[self.section]
        return entries

    def entries_holding(self, value: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and entry wherever this string stands, in upper or lower case."""
        text = _read(self.file_name)
        lowered, wanted = text.lower(), json.dumps(value.lower()).encode()
        section = text.find(b'"%b"' % self.section.encode())
        position = lowered.find(wanted, _end_of_line(text, section))
        while position >= 0:
            end = _end_of_line(text, position)
            line = text[text.rfind(b"\n", 0, position) : end]
            yield from json.loads(b"{%b}" % line.rstrip(b",\r")).items()
            position = lowered.find(wanted, end)


def _end_of_line(text: bytes, start: int) -> int:
    end = text.find(b"\n", start)
    return len(text) if end < 0 else end


@cache
def _names(file_name: str, indent: int) -> tuple[str, ...]:
    """Found once: each nested config of each model looks through them."""
    after = _read(file_name).split(b'\n%b"' % (b" " * indent))[1:]
    named = b",".join(b'"%b"' % each[: each.index(b'": ')] for each in after)
    return tuple(json.loads(b"[%b]" % named))


@cache
def _read(file_name: str) -> bytes:
    return (_DATA_FOLDER / file_name).read_bytes()
