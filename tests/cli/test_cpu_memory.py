"""``--cpu-memory``: what a node's CPU RAM has to say."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.report.estimate import host_lines
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
    assert "CPU RAM 119.7 of 128.0 GiB" in shown.splitlines()[1]
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
    assert "H100-80  fits, CPU RAM OOM" in done.stdout
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
    assert "Nothing fits." in nothing.stdout


def test_a_size_needs_its_unit(run: Run) -> None:
    done = run("estimate", *JOB, "--cpu-memory", "512")
    assert done.exit_code == 2
    assert done.stderr.startswith("memplan: error: --cpu-memory: cannot read the size '512'")
