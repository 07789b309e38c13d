"""A command line read without Typer: as Typer reads it, or not at all."""

import shlex
from importlib import import_module
from typing import Any

import pytest

from memplan.cli import plain, top_help
from memplan.cli.commands import COMMANDS
from memplan.cli.taking import Command
from memplan.cli.with_typer.app import build, load_command


def command(name: str) -> Command:
    found: Command = getattr(import_module(f"memplan.cli.{name}"), name)
    return found


def looks(param: Any) -> tuple[object, ...]:
    names = tuple(param.opts), tuple(param.secondary_opts)
    is_list = param.param_type_name == "option" and bool(param.multiple)
    is_flag = bool(getattr(param, "is_flag", False))
    return param.name, names, param.param_type_name, param.metavar, is_flag, is_list


@pytest.mark.parametrize("name", COMMANDS)
def test_parameters_are_typers(name: str) -> None:
    typers = [each for each in load_command(name).params if each.name != "help"]
    assert [*map(looks, plain.parameters_of(command(name)))] == [*map(looks, typers)]


PLAIN = (
    "estimate",
    "estimate t5-3b --gpus 8",
    "estimate --gpus=8 gpt2 --gpu h100 --gpu a100 --assumptions --seq-len=64",
    "estimate gpt2 --tp 2 --optim sgd --format JSON --gpu= --offload cpu",
    "estimate gpt2 --max_length 512 --gradient-checkpointing true --lora --check",
    "sweep gpt2 --gpus 1..8 --zero 0-3 --batch-size 1,2 --format csv --jobs 2",
    "plan llama-3.1-8b --gpus 8..64 --gpu h100 --allow qlora --global-batch-size 64",
    "explain gpt2 --component weights --component gradients",
    "compare gpt2 t5-3b --preset trl-sft --preset unsloth",
    "compare --formulas gpt2",
    "admit -",
    "models qwen --format json",
    "gpus h100",
    "doctor",
    "verify gpt2 --engine fsdp",
    "flops gpt2 --seq-len 128",
)


@pytest.mark.parametrize("columns", ["40", "58", "80", "99", "140"])
def test_the_top_page_is_typers(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    context = build().make_context("memplan", [])
    assert top_help.page() == context.get_help()


@pytest.mark.parametrize("line", PLAIN)
def test_values_are_typers(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    read = plain.read(words)
    assert read is not None
    typers = load_command(words[0]).make_context(words[0], words[1:])
    assert [*read.params.items()] == [*typers.params.items()]
    assert [*map(type, read.params.values())] == [*map(type, typers.params.values())]
    for name in read.params:
        source = typers.get_parameter_source(name)
        assert read.get_parameter_source(name).name == source.name, name
    handed: list[dict[str, Any]] = []

    def kept(_command: Command, _ctx: object, found: dict[str, Any]) -> int:
        handed.append(found)
        return 0

    monkeypatch.setattr(Command, "run", kept)
    read.run()
    typers.command.invoke(typers)
    assert handed[0] == handed[1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "estimte gpt2",
        "estimate --help",
        "estimate --legend",
        "estimate gpt2 bert",
        "estimate gpt2 --no-such-option",
        "estimate gpt2 --seq-len",
        "estimate gpt2 --seq-len -5",
        "compare --hidden-size 0",
        "estimate gpt2 --format yml",
        "estimate gpt2 --seq-len 5 --seq-len 6",
        "estimate gpt2 --assumptions=yes",
        "estimate -- gpt2",
        "plan",
        "doctor now",
    ],
)
def test_what_is_not_plain_is_left_to_typer(line: str) -> None:
    assert plain.read(shlex.split(line)) is None


def test_defaults_of_the_users_own_are_left_to_typer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MEMPLAN_CONFIG", str(tmp_path))
    assert plain.read(["estimate", "gpt2"]) is None
