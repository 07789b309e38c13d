"""``memplan compare``: two setups side by side, as a user types it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
JOB = ("llama-3.2-1b", "--precision", "bf16", "--gpu", "v100-16gb")


def rows_of(run: Run, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    document = json.loads(run("compare", *arguments, "--format", "json").stdout)
    assert document["schema_version"] == 2
    return {(row["kind"], row["name"]): row for row in document["rows"]}


def estimate_of(run: Run, *arguments: str) -> dict[str, Any]:
    (row,) = json.loads(run("estimate", *arguments, "--format", "json").stdout)["rows"]
    return row


def test_the_verdicts_and_what_moved_come_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = run("compare", *JOB, "--vs", "--seq-len 1024").stdout.splitlines()
    assert re.match(r"as given  V100-16  does not fit   needs [\d.-]+ of 15.8 GiB", lines[0])
    assert re.match(r"--vs      V100-16  (fits|tight|does not fit) +needs ", lines[1])
    said = " ".join(" ".join(lines[1:8]).split())
    assert re.search(r"--seq-len 1024 needs [\d.]+ GiB less, .*: activations [\d.]+ GiB less", said)
    assert any("· 1,024 tokens ·" in line for line in lines)


def test_figures_are_those_of_estimate_and_add_up(run: Run) -> None:
    one = estimate_of(run, *JOB)
    other = estimate_of(run, *JOB, "--checkpointing", "full", "--batch-size", "2")
    rows = rows_of(run, *JOB, "--vs", "--checkpointing full --batch-size 2")
    for row, name in ((rows["sum", "allocated"], "worst_bytes"),
                      (rows["sum", "needed, at most"], "total_high_bytes")):  # fmt: skip
        assert (row["first"], row["second"]) == (one[name], other[name])
    parts = [row for (kind, _), row in rows.items() if kind == "component"]
    assert sum(row["difference"] for row in parts) == rows["sum", "allocated"]["difference"]
    assert rows["phase", "backward"]["first"] == max(one["peak_bytes"], 0)
    for name in ("verdict", "largest_micro_batch"):
        row = rows["answer", name]
        assert (row["first"] or 0, row["second"] or 0) == (one[name] or 0, other[name] or 0)


def test_another_engine_and_another_card(run: Run) -> None:
    job = ("--gpus 8 --zero 3 --gpu h100 --precision bf16-master",)
    shown = run("compare", *JOB, "--vs", *job).stdout
    assert "8 GPUs, ZeRO-3 · bf16-master" in " ".join(shown.split())
    assert "H100-80  fits" in shown


def test_an_engine_brings_its_own_stage_and_precision(run: Run) -> None:
    shown = run("compare", "gpt2", "--gpus", "8", "--zero", "2", "--vs", "--engine fsdp")
    assert shown.exit_code == 0, shown.stderr
    assert "FSDP2 · bf16-mixed" in " ".join(shown.stdout.split())


def test_two_models(run: Run) -> None:
    rows = rows_of(run, "gpt2", "gpt2-medium", "--lora", "8", "--tokens", "1B", "--price", "2")
    one, other = (
        estimate_of(run, "gpt2", "--lora", "8", "--gpu", "a100"),
        estimate_of(run, "gpt2-medium", "--lora", "8", "--gpu", "a100"),
    )
    row = rows["sum", "needed, at most"]
    assert (row["first"], row["second"]) == (one["total_high_bytes"], other["total_high_bytes"])
    assert rows["answer", "label"]["second"] == "gpt2-medium"
    assert rows["answer", "cost"]["second"] > rows["answer", "cost"]["first"] > 0
    hours, cost = rows["answer", "gpu_hours"], rows["answer", "cost"]
    assert cost["first"] == pytest.approx(2 * hours["first"], rel=0.02)


def test_two_files_and_two_presets(run: Run, tmp_path: Path) -> None:
    files = []
    for stage in (2, 3):
        path = tmp_path / f"stage{stage}.yaml"
        path.write_text(f"num_gpus: 8\nengine: deepspeed\nzero_stage: {stage}\n")
        files.append(str(path))
    shown = run("compare", "gpt2", "--setup", *files)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("stage2.yaml  A100-80  fits")
    assert "ZeRO-3 · bf16-master" in " ".join(shown.stdout.split())
    again = run("compare", "gpt2", "--setup", ",".join(files))
    assert again.stdout == shown.stdout
    presets = run("compare", "llama-3.2-1b", "--preset", "trl-sft", "unsloth")
    assert presets.exit_code == 0, presets.stderr
    assert presets.stdout.startswith("trl-sft  A100-80  ")
    assert presets.stderr.count("\n") <= 2
    rows = rows_of(run, "llama-3.2-1b", "--preset", "trl-sft,unsloth")
    assert (
        rows["sum", "needed, at most"]["second"]
        == estimate_of(run, "llama-3.2-1b", "--preset", "unsloth", "--gpu", "a100")[
            "total_high_bytes"
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("gpt2", "--vs", ""), 2, "names no option"),
        (("gpt2", "--vs", "gpt2"), 2, "makes no use of MODEL"),
        (("gpt2", "--vs", "--task base"), 2, "makes no use of --task"),
        (("gpt2", "--vs", "--sequ-len 3"), 2, "no option --sequ-len. Did you mean '--seq-len'"),
        (("gpt2", "--vs", "--gpu a100,h100"), 2, "takes one"),
        (("gpt2", "--vs", "--seq-len '3"), 2, "cannot be split"),
        (("gpt2", "--vs", "--optimizer adam"), 3, "optimizer"),
        (("gpt2", "t5-small", "bert-base-uncased"), 2, "there are 3"),
        ((), 2, "name a MODEL and what differs"),
        (("gpt2", "--preset", "unsloth", "trl-sft", "t5-small"), 2, "one MODEL"),
        (("gpt2", "--lora", "8", "--formulas"), 2, "--formulas makes no use of --lora"),
    ],
)
def test_what_describes_no_two_setups_is_refused(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = run("compare", *arguments)
    assert done.exit_code == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_model_alone_is_set_beside_formulas_with_a_word(run: Run) -> None:
    asked, plain = run("compare", "gpt2", "--formulas"), run("compare", "gpt2")
    assert asked.stdout == plain.stdout
    assert asked.stderr == ""
    assert "memplan compare MODEL --formulas" in plain.stderr
    assert plain.stderr.count("\n") == 1
