"""A config of an unknown type: refused by every command, or read as the nearest and said so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ExitCode

Run = Callable[..., Any]
CONFIG = {
    "model_type": "zorblax", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 2048, "vocab_size": 32000, "odd_key": 3,
}  # fmt: skip
COMMANDS = {
    "estimate": (), "sweep": ("--gpus", "1,2"), "plan": ("--gpu", "h100"), "explain": (),
    "compare": (), "flops": (), "models": (),
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_with_the_nearest_family(run: Run, config: str, command: str) -> None:
    answer = run(command, config, *COMMANDS[command])
    assert answer.exit_code == ExitCode.INPUT
    assert "--family mistral, or --allow-guess" in answer.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_said_beside_the_figures(run: Run, config: str, command: str) -> None:
    printed = run(command, config, *COMMANDS[command], "--allow-guess").stdout
    assert "A GUESS: model_type 'zorblax'" in " ".join(printed.split())


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "models"])
def test_said_to_scripts(run: Run, config: str, command: str) -> None:
    asked = (command, config, *COMMANDS[command], "--allow-guess", "--format", "json")
    assumptions = json.loads(run(*asked).stdout)["assumptions"]
    assert any("zorblax" in text and "odd_key" in text for text in assumptions)
