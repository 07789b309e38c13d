"""Data files of one entry a line: what is read of one line is what the whole file says."""

import json

import pytest

from memplan.sources.about_models import entry_file
from memplan.sources.about_models.entry_file import EntryFile

FILES = [
    pytest.param(EntryFile(file_name="models.json", section="models", indent=4), id="models"),
    pytest.param(
        EntryFile(file_name="config_defaults.json", section="types", indent=2), id="defaults"
    ),
]
SMALL = EntryFile(file_name="small.json", section="models", indent=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> EntryFile:
    """A file with entries that hold each other's names, and one that is no JSON."""
    text = b"""{
  "version": "b",
  "models": {
    "a": {"hub_id": "X/A", "kind": "b"},
    "b": {"hub_id": "X/B", "a": 1},
    "broken": {"hub_id": ,
    "quoted\\"": {"hub_id": "last"}
  }
}
"""
    monkeypatch.setattr(entry_file, "_read", lambda _: text)
    return SMALL


@pytest.mark.parametrize("file", FILES)
def test_one_line_says_what_the_whole_file_says(file: EntryFile) -> None:
    entries = file.entries()
    assert len(entries) > 200
    assert file.names() == tuple(entries)
    assert {name: file.entry(name) for name in entries} == entries


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "name",
    ["", " ", "version", "models", "types", "schema_version", "hub_id", "a\nb", '"', "é", "\ud800"],
)
def test_what_is_no_entry(file: EntryFile, name: str) -> None:
    assert file.entry(name) is None


def test_other_lines_are_not_parsed(small: EntryFile) -> None:
    assert small.entry("a") == {"hub_id": "X/A", "kind": "b"}
    assert small.entry('quoted"') == {"hub_id": "last"}
    assert small.names() == ("a", "b", "broken", 'quoted"')
    with pytest.raises(json.JSONDecodeError):
        small.entry("broken")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("x/a", ["a"]),
        ("X/B", ["b"]),
        ("b", ["a", "b"]),
        ("last", ['quoted"']),
        ("X", []),
        ("version", []),
        ("models", []),
    ],
)
def test_entries_that_hold_a_string(small: EntryFile, value: str, names: list[str]) -> None:
    assert [name for name, _ in small.entries_holding(value)] == names


def test_files_with_carriage_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{\r\n  "models": {\r\n    "a": {"x": "Y"},\r\n    "b": {"x": "z"}\r\n  }\r\n}\r\n'
    monkeypatch.setattr(entry_file, "_read", lambda _: text)
    assert (SMALL.entry("a"), SMALL.entry("b")) == ({"x": "Y"}, {"x": "z"})
    assert list(SMALL.entries_holding("y")) == [("a", {"x": "Y"})]
