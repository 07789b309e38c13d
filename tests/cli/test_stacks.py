"""``--preset``, and files of training stacks as ``--setup``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.sources.stacks.presets import preset_names

Run = Callable[..., Any]


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    done = run("estimate", *arguments, "--gpu", "h100", "--format", "json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)["rows"]


def test_the_help_names_every_preset(run: Run) -> None:
    text = " ".join(run("estimate", "--help", "files").stdout.split())
    assert ", ".join(preset_names()) in text


def test_a_preset_is_one_setup_that_options_go_over(run: Run) -> None:
    (row,) = rows(run, "llama-3.2-1b", "--preset", "trl-sft", "--gpus", "8", "--batch-size", "2")
    assert (row["engine"], row["micro_batch_size"], row["seq_len"]) == ("ddp", 2, 1024)


def test_a_preset_means_what_the_engine_makes_of_it(run: Run) -> None:
    found = rows(run, "llama-3.2-1b", "--preset", "trl-sft", "--gpus", "8", "--engine", "ddp,fsdp")
    assert {row["engine"]: row["precision"] for row in found} == {
        "ddp": "bf16-amp", "fsdp": "bf16-mixed",
    }  # fmt: skip


def test_a_preset_under_zero(run: Run) -> None:
    found = rows(run, "llama-3.2-1b", "--preset", "trl-sft", "--gpus", "8", "--zero", "3")
    assert {(row["engine"], row["zero_stage"]) for row in found} == {("deepspeed", 3)}


def test_the_answer_says_what_the_preset_set(run: Run) -> None:
    said = run(
        "estimate", "llama-3.2-1b", "--preset", "hf-trainer", "--gpu", "h100", "--assumptions"
    ).stdout
    assert "preset hf-trainer: optim adamw_torch_fused (transformers" in " ".join(said.split())


def test_the_model_is_the_files(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 2\n")
    (row,) = rows(run, "--setup", str(path))
    assert (row["model"], row["micro_batch_size"]) == ("llama-3.2-1b", 2)
    (row,) = rows(run, "llama-3.1-8b", "--setup", str(path))
    assert row["model"] == "llama-3.1-8b"


def test_a_setup_without_a_model_asks_for_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("num_gpus: 2\n")
    done = run("estimate", "--setup", str(path))
    assert done.exit_code == 2
    assert "name a MODEL" in done.stderr


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_plan_and_sweep_start_from_a_preset(run: Run, command: str) -> None:
    done = run(command, "llama-3.2-1b", "--preset", "trl-sft", "--gpus", "2", "--gpu", "h100")
    assert done.exit_code == 0, done.stderr
    assert "preset trl-sft: max_length 1024" in done.stderr


def test_a_preset_of_another_stack_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: meta-llama/Llama-3.2-1B\n")
    done = run("estimate", "--setup", str(path), "--preset", "trl-dpo")
    assert done.exit_code == 3
    assert "another stack's" in done.stderr
