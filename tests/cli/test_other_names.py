"""Options under the names that people know from elsewhere."""

from collections.abc import Callable
from pathlib import Path
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
        ("--qlora", "It is called '--lora 16 --quantize nf4'"),
        ("--inference", "Memplan is about training"),
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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "run.yml",
            "base_model: gpt2\nmicro_batch_size: 2\nadapter: lora\n",
            "give it as --setup run.yml",
        ),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "--deepspeed-config ds.json"),
        ("setup.yaml", "engine: fsdp\nnum_gpus: 8\n", "give it as --setup setup.yaml"),
        ("model.yaml", "hidden_size: 8\n", "model_type: is missing"),
    ],
)
def test_a_file_that_is_no_models_is_told_its_option(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    done = run("estimate", name)
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_the_trainers_deepspeed_is_told_apart(run: Run) -> None:
    done = run("estimate", "gpt2", "--deepspeed", "ds.json")
    assert done.exit_code == 2
    assert "ds.json is given with --deepspeed-config" in done.stderr


@pytest.mark.parametrize("command", ["estimate", "sweep", "plan", "explain", "compare"])
def test_the_words_need_no_question(run: Run, command: str) -> None:
    done = run(command, "--legend")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "tight: " in done.stdout
