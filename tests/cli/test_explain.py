"""``memplan explain`` as a user types it."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
JOB = ("explain", "llama-3.2-1b", "--precision", "bf16", "--gpu", "v100-16gb")


def test_the_verdict_and_the_fix_come_first(run: Run) -> None:
    lines = run(*JOB).stdout.splitlines()
    assert lines[0].startswith("llama-3.2-1b (causal-lm) · 1.24B · 1 GPU · bf16 · 2,048 tokens")
    first = next(line for line in lines if line.startswith("  "))
    assert re.fullmatch(r"  V100-16  OOM   needs [\d.]+-[\d.]+ of 15.8 GiB", first)
    assert lines[lines.index(first) + 1].startswith("    to fit: --checkpointing full (")


def test_two_setups_side_by_side(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(*JOB, "--versus", "--seq-len 1024").stdout
    assert "· 2,048 tokens ·" in shown
    assert "· 1,024 tokens ·" in shown
    assert " as given  --seq-len 1024 " in shown
    assert re.search(r"^--seq-len 1024 needs [\d.]+ GiB less, .*: activations", shown, re.MULTILINE)


def test_side_by_side_adds_up(run: Run) -> None:
    one, other = (
        json.loads(run("estimate", *job, "--format", "json").stdout)["rows"][0]
        for job in ((*JOB[1:],), (*JOB[1:], "--checkpointing", "full", "--batch-size", "2"))
    )
    document = json.loads(
        run(*JOB, "--versus", "--checkpointing full --batch-size 2", "--format", "json").stdout
    )
    rows = {row["component"]: row for row in document["rows"]}
    assert rows["allocated"]["bytes"] == one["worst_bytes"]
    assert rows["allocated"]["versus_bytes"] == other["worst_bytes"]
    assert rows["needed, at most"]["versus_bytes"] == other["total_high_bytes"]
    parts = [row for name, row in rows.items() if f"{name}_bytes" in one]
    assert sum(row["difference_bytes"] for row in parts) == rows["allocated"]["difference_bytes"]


def test_another_engine_and_another_card(run: Run) -> None:
    shown = run(*JOB, "--versus", "--gpus 8 --zero 3 --gpu h100 --precision bf16-master").stdout
    assert "8 GPUs, ZeRO-3 · bf16-master" in " ".join(shown.split())
    assert "H100-80  fits" in shown


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", 2, "names no option"),
        ("gpt2", 2, "makes no use of MODEL"),
        ("--task base", 2, "makes no use of --task"),
        ("--sequ-len 3", 2, "no option --sequ-len. Did you mean '--seq-len'"),
        ("--gpu a100,h100", 2, "takes one"),
        ("--seq-len '3", 2, "cannot be split"),
        ("--optimizer adam", 3, "optimizer"),
    ],
)
def test_what_describes_no_other_setup_is_refused(
    run: Run, text: str, code: int, words: str
) -> None:
    done = run(*JOB, "--versus", text)
    assert done.exit_code == code, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_step_as_lanes(run: Run) -> None:
    job = (
        "explain",
        "llama-3.1-8b",
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "--zero",
        "3",
        "--seq-len",
        "4096",
    )
    lines = run(*job, "--time").stdout.splitlines()
    assert re.match(r"Step on H100-80: [\d.]+ m?s \(.*\), [\d,]+ tokens/s per GPU", lines[0])
    lanes = {
        line.split()[0]: line for line in lines if line.startswith(("compute ", "communication "))
    }
    assert set(lanes["compute"].split()[1]) == set("█▓")
    assert "▒" in lanes["communication"]
    assert any(line.endswith("decoder.layers, backward") for line in lines)
    assert run(*job, "--time", "--format", "json").exit_code == 2
