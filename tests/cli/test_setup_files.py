"""Engines' own files as input of ``memplan estimate``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

DEEPSPEED = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
}


@pytest.fixture
def deepspeed_file(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    return str(path)


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    done = run("estimate", "llama-3.2-1b", "--gpus", "8", "--gpu", "h100", *arguments,
               "--format", "json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def test_deepspeed_config(run: Run, deepspeed_file: str) -> None:
    (row,) = rows(run, "--deepspeed-config", deepspeed_file, "--batch-size", "2")
    assert (row["engine"], row["zero_stage"], row["offload_optimizer"]) == ("deepspeed", 3, "cpu")
    assert (row["micro_batch_size"], row["gradient_accumulation_steps"]) == (2, 2)


def test_the_file_is_the_same_as_the_options(run: Run, deepspeed_file: str) -> None:
    (row,) = rows(run, "--deepspeed-config", deepspeed_file)
    options = ("--zero", "3", "--offload", "cpu", "--gradient-accumulation", "2")
    (typed,) = [each for each in rows(run, *options) if each["offload_param"] == "none"]
    assert row == typed


@pytest.mark.parametrize(
    "arguments", [["--engine", "fsdp"], ["--zero", "2"], ["--gradient-accumulation", "4"]]
)
def test_what_contradicts_the_file_is_refused(
    run: Run, deepspeed_file: str, arguments: list[str]
) -> None:
    done = run(
        "estimate", "llama-3.2-1b", "--gpus", "8", "--deepspeed-config", deepspeed_file, *arguments
    )
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert "ds.json" in done.stderr


def test_accelerate_config(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    (row,) = rows(run, "--accelerate-config", str(path))
    assert (row["engine"], row["precision"]) == ("fsdp", "bf16-mixed")


def test_a_whole_setup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("engine: fsdp\nmicro_batch_size: 4\nseq_len: 1024\ncheckpointing: full\n")
    (row,) = rows(run, "--setup", str(path), "--batch-size", "8")
    assert (row["engine"], row["micro_batch_size"], row["seq_len"]) == ("fsdp", 8, 1024)
    assert row["checkpointing"] == "full"


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--deepspeed-config", '{"zero_optimization": {"stge": 3}}', "stage"),
        ("--accelerate-config", "fsdp_confg: {}", "fsdp_config"),
        ("--setup", "micro_batch: 4", "micro_batch_size"),
    ],
)
def test_unknown_keys_are_refused(
    run: Run, tmp_path: Path, option: str, content: str, words: str
) -> None:
    path = tmp_path / ("file.json" if content.startswith("{") else "file.yaml")
    path.write_text(content)
    done = run("estimate", "llama-3.2-1b", "--gpus", "8", option, str(path))
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "engine", "precision"),
    [
        ([], "fsdp", "bf16-mixed"),
        (["--precision", "fp32"], "fsdp", "fp32"),
        (["--engine", "fsdp1"], "fsdp1", "bf16-mixed"),
        (["--engine", "fsdp1", "--precision", "bf16"], "fsdp1", "bf16"),
    ],
)
def test_training_arguments_with_fsdp(
    run: Run, tmp_path: Path, options: list[str], engine: str, precision: str
) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"bf16": True, "fsdp": True}))
    (row,) = rows(run, "--training-args", str(path), *options)
    assert (row["engine"], row["precision"]) == (engine, precision)


def test_what_a_file_does_not_hold_is_in_the_answer(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"max_length": 512, "packing": True}))
    arguments = ["estimate", "llama-3.2-1b", "--gpus", "8", "--gpu", "h100"]
    table = run(*arguments, "--training-args", str(path))
    answer = run(*arguments, "--training-args", str(path), "--format", "json")
    assert "SFTConfig's default" in table.stdout
    assert any("as packing makes it" in each for each in json.loads(answer.stdout)["assumptions"])


def test_training_arguments_and_the_launcher_s_file(
    run: Run, tmp_path: Path, deepspeed_file: str
) -> None:
    path = tmp_path / "args.json"
    path.write_text(
        json.dumps({
            "bf16": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        })
    )  # fmt: skip
    (row,) = rows(run, "--training-args", str(path), "--deepspeed-config", deepspeed_file)
    assert (row["engine"], row["zero_stage"], row["micro_batch_size"]) == ("deepspeed", 3, 2)
