import re
import subprocess
import sys
from pathlib import Path

import pytest

import memplan


def test_importing_memplan_loads_no_third_party_package(checkout: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import memplan; "
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(loaded & {'typer', 'rich', 'yaml', 'huggingface_hub', 'pydantic'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_top_of_the_changelog_is_this_version(checkout: Path) -> None:
    changelog = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert versions[0] == memplan.__version__


@pytest.mark.parametrize("name", memplan.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(memplan, name)
    assert name in dir(memplan)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memplan.nothing  # noqa: B018


KINDS = {".py", ".json", ".yaml", ".typed", ".c", ".cpp"}
"""Of files that the package is made of."""
COMPILED = {"memplan/memory/_replay.c", "memplan/verify/on_torch/pretend_card.cpp"}
"""The first stays out of the wheel; ``memplan verify`` compiles the second where it runs."""


def test_the_package_is_made_of_its_own_kinds_of_files_alone(checkout: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "memplan"], cwd=checkout, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    strange = [name for name in listed.stdout.split() if Path(name).suffix not in KINDS]
    assert strange == []
    code = {name for name in listed.stdout.split() if Path(name).suffix in (".c", ".cpp")}
    assert code == COMPILED


OURS = ("outcomes.json", "plain.yaml")
"""Files of no one's facts but memplan's own."""


def test_no_room_is_larger_than_a_reader_can_survey(checkout: Path) -> None:
    folders = {each.parent for each in (checkout / "memplan").rglob("*.py")}
    sizes = {folder.relative_to(checkout): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > 25} == {}


def test_the_data_card_names_every_file_its_source_and_licence(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(checkout / "docs"))
    import data_card  # type: ignore[import-not-found]

    page = data_card.card()
    files = data_card.data_files()
    assert len(files) > 30
    for path in files:
        name = path.relative_to(data_card.DATA).as_posix()
        lines = [each for each in page.splitlines() if each.startswith(f"| `{name}` |")]
        assert len(lines) == 1, name
        (line,) = lines
        *_, source, licence, _ = (cell.strip() for cell in line.split(" |"))
        assert source, name
        assert licence in data_card.licences_of(path), name
        # Who has a source has a licence, but for settings of memplan's own.
        assert data_card.projects_in(data_card.source_of(path)) or path.name in OURS, name
