"""``--cpu-memory``: what a node's CPU RAM has to say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.estimator import estimate
from memplan.report.estimates.account import host_formulas, host_lines
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

Run = Callable[..., Any]
JOB = ("llama-3.1-8b", "--gpus", "8", "--gpu", "h100")


def test_a_comparison_judges_cpu_ram_by_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("estimate", *JOB, "--cpu-memory", "128GiB").stdout
    rows = json.loads(run("estimate", *JOB, "--cpu-memory", "128GiB", "--format", "json").stdout)[
        "rows"
    ]
    assert {row["host_verdict"] for row in rows} == {"fits", "OOM"}
    for row in rows:
        assert row["node_memory_bytes"] == 128 * 2**30
        assert (row["host_verdict"] == "fits") == (row["host_bytes"] <= 128 * 2**30)
        verdict = re.escape(f"{row['host_verdict']:4}")
        assert re.search(rf"{verdict} +{row['host_bytes'] / 2**30:,.1f} ", shown)
    assert "CPU RAM 119.7 of 128.0 GiB" in shown.splitlines()[0]
    assert "host_verdict" not in run("estimate", *JOB, "--format", "json").stdout


def test_the_simplest_that_fits_fits_the_node_too(run: Run) -> None:
    # DDP and FSDP2 load a copy on each rank; stage 3 under zero.Init does not.
    shown = run("estimate", *JOB, "--checkpointing", "full", "--cpu-memory", "64GiB").stdout
    assert "H100-80  fits with ZeRO-3" in shown


def test_one_setup_says_why_and_what_would_help(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    job = (*JOB, "--engine", "fsdp", "--checkpointing", "full", "--cpu-memory", "128GiB")
    done = run("estimate", *job, "--check")
    assert done.exit_code == 5
    assert "H100-80  fits, but not the CPU RAM" in done.stdout
    assert "8 ranks together, while loading: each rank loads a copy of the model" in done.stdout
    options = re.search(r"to fit: (--.*) \(ZeRO-1: CPU RAM of a node 119.7 GiB", done.stdout)
    assert options is not None
    job = tuple(word for word in job if word not in ("--engine", "fsdp"))
    assert run("estimate", *job, *options[1].split(), "--check", "any").exit_code == 0


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({"engine": "ddp"}, "239.3 GiB, 8 ranks together, while loading: each rank loads a copy"),
        ({"zero_stage": 3}, "29.9 GiB, 8 ranks together, while saving"),
        (
            {"zero_stage": 2, "offload_optimizer": "cpu"},
            "162.8 GiB, 8 ranks together, while saving: a checkpoint, beside what is offloaded",
        ),
    ],
)
def test_why_cpu_ram_is_needed(setup: dict[str, Any], words: str) -> None:
    answer = estimate(load_model("llama-3.1-8b"), TrainingSetup(num_gpus=8, **setup))
    (line,) = host_lines([answer])
    assert words in line


def test_a_plan_respects_it(run: Run) -> None:
    job = ("plan", "llama-3.1-8b", "--gpus", "8", "--gpu", "h100", "--seq-len", "512")
    free = json.loads(run(*job, "--format", "json").stdout)["rows"]
    assert max(row["host_bytes"] for row in free) > 128 * 2**30
    bound = json.loads(run(*job, "--cpu-memory", "128GiB", "--format", "json").stdout)["rows"]
    assert bound
    assert max(row["host_bytes"] for row in bound) <= 128 * 2**30
    shown = run(*job, "--cpu-memory", "128GiB").stdout
    assert "Needs more CPU RAM than the 128.0 GiB of a node:\n  8 GPUs, DDP: 239.3 GiB" in shown
    nothing = run(*job, "--cpu-memory", "1GiB")
    assert nothing.exit_code == 0
    assert "Nothing fits " in nothing.stdout


def test_a_size_needs_its_unit(run: Run) -> None:
    done = run("estimate", *JOB, "--cpu-memory", "512")
    assert done.exit_code == 2
    assert done.stderr.startswith("memplan: error: --cpu-memory: cannot read the size '512'")


SWEEP = ("sweep", "llama-3.1-8b", "--gpus", "8,16", "--zero", "2,3", "--gpu", "a100")


def test_a_sweep_judges_it_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = json.loads(run(*SWEEP, "--cpu-memory", "64GiB", "--format", "json").stdout)["rows"]
    assert [row["host_verdict"] for row in rows] == ["OOM", "fits", "OOM", "fits"]
    assert all(row["host_bytes"] <= 64 * 2**30 for row in rows if row["host_verdict"] == "fits")
    shown = run(*SWEEP, "--cpu-memory", "64GiB").stdout
    assert "A100-80  2 of 4 fit, 2 do not fit" in shown
    assert "of 64.0 GiB" in shown
    assert run(*SWEEP, "--check").exit_code == 0
    assert run(*SWEEP, "--cpu-memory", "64GiB", "--check").exit_code == 5
    markdown = run(*SWEEP, "--cpu-memory", "64GiB", "--format", "markdown").stdout
    assert markdown.splitlines()[0].endswith("| verdict | host verdict |")


def test_a_matrix_marks_it(run: Run) -> None:
    shown = run(*SWEEP, "--cpu-memory", "64GiB", "--pivot", "host,gpus,setup").stdout
    assert re.search(r"^ +8 +119\.7! +29\.9$", shown, re.MULTILINE)
    assert "64.0 GiB of CPU RAM" in shown


def test_several_processes_judge_the_same(run: Run) -> None:
    command = (*SWEEP, "--cpu-memory", "64GiB", "--format", "csv")
    assert run(*command, "--jobs", "2").stdout == run(*command).stdout


def test_a_sweep_file_says_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    text = (
        "version: 1\nmodel: llama-3.1-8b\n"
        "hardware: {gpu: a100, cpu_memory: %s}\n"
        "axes: {num_gpus: 8, zero_stage: [2, 3]}\n"
    )
    file.write_text(text % "64GiB")
    rows = json.loads(run("sweep", str(file), "--format", "json").stdout)["rows"]
    assert [row["host_verdict"] for row in rows] == ["OOM", "fits"]
    given = run("sweep", str(file), "--cpu-memory", "1TiB", "--format", "json").stdout
    assert {row["host_verdict"] for row in json.loads(given)["rows"]} == {"fits"}
    file.write_text(text % "64GX")
    done = run("sweep", str(file))
    assert done.exit_code == 3
    assert f"{file}: hardware.cpu_memory: cannot read the size '64GX'" in done.stderr


def test_in_python() -> None:
    setup = TrainingSetup(num_gpus=8, zero_stage=2)
    answer = memplan.estimate("llama-3.1-8b", setup, gpu="a100", cpu_memory="64GiB")
    assert (answer.verdict, answer.host_verdict, answer.job_verdict) == ("fits", "OOM", "OOM")
    found = memplan.sweep(
        "llama-3.1-8b", {"num_gpus": 8, "zero_stage": [2, 3]}, gpus=["a100"], cpu_memory=2**36
    )
    assert [row["host_verdict"] for row in found.rows()] == ["OOM", "fits"]


@pytest.mark.parametrize(
    "setup", [{"engine": "ddp"}, {"zero_stage": 3}, {"zero_stage": 2, "offload_optimizer": "cpu"}]
)
def test_the_arithmetic_of_cpu_ram(setup: dict[str, Any]) -> None:
    answer = estimate(load_model("llama-3.1-8b"), TrainingSetup(num_gpus=8, **setup))
    head, *lines = host_formulas(answer)
    totals = []
    for line in lines:
        total, formula = re.fullmatch(r"  while \w+ ([\d.,]+) GiB = (.*)|.*", line).groups()  # type: ignore[union-attr]
        if total is None:  # between steps
            continue
        terms = re.findall(r"(?:(\d+) ranks x )?([\d.]+) B x ([\d,]+)", formula)
        added = sum(
            int(ranks or 1) * float(size) * int(count.replace(",", ""))
            for ranks, size, count in terms
        )
        assert added / 2**30 == pytest.approx(float(total.replace(",", "")), rel=9e-4)
        totals.append(total)
    assert any(f" {total} GiB" in head for total in totals)
