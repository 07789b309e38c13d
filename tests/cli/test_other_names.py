"""Options under the names that people know from elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.cli.app import load_command
from memplan.options.other_names import RENAMED, other_name

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    return tuple(name for param in load_command("estimate").params for name in param.opts)


def test_what_is_named_is_there_and_what_is_renamed_is_not(options: tuple[str, ...]) -> None:
    for name in RENAMED:
        assert f"--{name}" not in options
        assert other_name(f"--{name}", options)
    for told in RENAMED.values():
        assert told.split()[0] in options


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--lora-rank", "It is called '--lora'"),
        ("--load_in_4bit", "It is called '--quantize'"),
        ("--tensor-model-parallel-size", "It is called '--tensor-parallel'"),
        ("--expert-parallel-size", "It is called '--expert-parallel'"),
        ("--max-length", "It is called '--seq-len'"),
        ("--gradient-checkpointing", "It is called '--checkpointing full'"),
        ("--zeroo", "Did you mean '--zero'?"),
    ],
)
def test_the_message(run: Run, option: str, words: str) -> None:
    done = run("estimate", "gpt2", option, "1")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_only_what_the_command_has_is_offered(run: Run) -> None:
    assert "--optimizer" not in run("flops", "gpt2", "--optim", "sgd").stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--checkpointing", "true", "Did you mean 'full'?"),
        ("--optimizer", "adam", "Did you mean 'adamw-fused'?"),
        ("--attention", "flash_attention_2", "Did you mean 'flash'?"),
        ("--engine", "zero-3", "Did you mean 'deepspeed', with the stage beside it?"),
        ("--precision", "fp8", "Did you mean 'bf16', with a recipe of fp8 beside it?"),
        ("--offload", "true", "Did you mean 'cpu'?"),
    ],
)
def test_values_as_others_call_them(run: Run, option: str, value: str, words: str) -> None:
    done = run("estimate", "gpt2", option, value)
    assert done.exit_code == 3
    assert done.stderr.rstrip().endswith(words)
