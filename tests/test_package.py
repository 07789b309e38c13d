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
