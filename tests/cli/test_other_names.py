"""Options under the names that people know from elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.cli.with_typer.app import load_command
from memplan.options.other_names import RENAMED, other_name, own_words

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    return tuple(name for param in load_command("estimate").params for name in param.opts)


def test_what_is_named_is_there_and_what_is_renamed_is_not(options: tuple[str, ...]) -> None:
    for name in RENAMED:
        assert f"--{name}" not in options
        if name != "jsonl":  # only rows are written so
            assert own_words(f"--{name}", options)
            assert other_name(f"--{name}", options)
    for told in RENAMED.values():
        assert all(word in options for word in told.split() if word.startswith("--"))


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--lora-rank 8", {"lora": 8}),
        ("--lora", {"lora": 16}),
        ("--qlora", {"lora": 16, "quantize": "nf4"}),
        ("--qlora 64", {"lora": 64, "quantize": "nf4"}),
        ("--load_in_4bit --lora max", {"lora": "max", "quantize": "nf4"}),
        ("--load-in-8bit true --peft", {"lora": 16, "quantize": "int8"}),
        ("--tensor-model-parallel-size=2", {"tensor_parallel": 2}),
        ("--max_length 4k", {"seq_len": 4096}),
        ("--gradient-checkpointing", {"checkpointing": "full"}),
        ("--gradient-checkpointing True", {"checkpointing": "full"}),
        ("--gradient-checkpointing=false", {"checkpointing": "none"}),
        ("--offload-optimizer nvme", {"offload": "nvme"}),
        ("--cpu-offload", {"offload": "cpu"}),
        ("--fsdp --json", {"engine": "fsdp", "format": "json"}),
        ("--check --csv", {"check": "all", "format": "csv"}),
        ("--dpo", {"job": "dpo"}),
        ("--batch_size 4", {"batch_size": 4}),
    ],
)
def test_names_from_elsewhere_are_taken(typed: str, read: dict[str, object]) -> None:
    command = load_command("estimate")
    for words in (["gpt2", *typed.split()], [*typed.split(), "gpt2"]):
        values = command.make_context("estimate", list(words)).params
        assert {"model": "gpt2", **read} == {name: values[name] for name in ("model", *read)}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--inference", "Memplan is about training"),
        ("--bf16", "--precision"),
        ("--zeroo", "Did you mean '--zero'?"),
    ],
)
def test_the_message(run: Run, option: str, words: str) -> None:
    done = run("estimate", "gpt2", option, "1")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_value_is_no_option(run: Run) -> None:
    done = run("compare", "gpt2", "--gpu", "t4", "--vs", "--qlora")
    assert done.stdout.splitlines()[2].startswith("--qlora needs ")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["legend"], "The answer"),
        (["--legend"], "The answer"),
        (["version"], "memplan "),
        (["help"], "Usage: memplan [OPTIONS] COMMAND"),
        (["help", "estimate"], "Usage: memplan estimate"),
    ],
)
def test_options_as_commands(run: Run, words: list[str], first: str) -> None:
    assert run(*words).stdout.startswith(first)


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
