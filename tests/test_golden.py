"""What the command line prints, word for word.

A case is a file in ``golden``: its first line is the command, ``$ [NAME=value ...] memplan ...``,
the rest is what it answers. For a new case write the first line and run ``make golden``.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

CASES = sorted((Path(__file__).parent / "golden").glob("*.txt"))


def parse(command: str) -> tuple[dict[str, str], list[str]]:
    """Split ``$ COLUMNS=80 memplan gpus`` into its settings and memplan's arguments."""
    words = shlex.split(command.removeprefix("$ "))
    program = words.index("memplan")
    return dict(word.split("=", 1) for word in words[:program]), words[program + 1 :]


def transcript(command: str, outcome: Any) -> str:
    errors = f"[stderr]\n{outcome.stderr}" if outcome.stderr else ""
    return f"{command}\n{outcome.stdout}{errors}[exit code {outcome.exit_code}]\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_output_is_as_recorded(
    case: Path,
    run: Callable[..., Any],
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    recorded = case.read_text(encoding="utf-8")
    command = recorded.partition("\n")[0]
    settings, arguments = parse(command)
    monkeypatch.chdir(checkout)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    printed = transcript(command, run(*arguments))
    if request.config.getoption("--update-golden"):
        case.write_text(printed, encoding="utf-8")
    else:
        assert printed == recorded
