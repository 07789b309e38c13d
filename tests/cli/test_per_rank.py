"""``--per-rank`` and what is said where loading decides."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
JOB = (
    "estimate", "qwen2.5-7b", "--gpus", "8", "--engine", "deepspeed", "--zero", "2", "--seq-len",
    "512", "--per-rank", "--gpu", "h100",
)  # fmt: skip


def test_every_distinct_rank_is_a_line(run: Run) -> None:
    shown = run(*JOB)
    assert shown.exit_code == 0
    lines = [line.split() for line in shown.stdout.splitlines()]
    offloaded = [line for line in lines if line[-4:-3] and "1-6" in line]
    assert [line[line.index("1-6") + 1] for line in offloaded] == ["6"]
    assert any(line[:4] == ["ZeRO-2,", "cpu", "optimizer", "7"] for line in lines)


def test_every_distinct_rank_is_a_row(run: Run) -> None:
    rows = json.loads(run(*JOB, "--format", "json").stdout)["rows"]
    for place in ("none", "cpu"):
        own = [row for row in rows if row["offload_optimizer"] == place]
        peaks = [row["peak_bytes"] for row in own]
        assert peaks == sorted(peaks, reverse=True)
        assert sum(row["num_ranks"] for row in own) == 8
    assert [row["ranks"] for row in rows if row["offload_optimizer"] == "cpu"] == ["7", "0", "1-6"]


def test_a_row_says_where_loading_decides(run: Run) -> None:
    job = ("estimate", "mixtral-8x7b", "--gpus", "16", "--gpu", "h100", "--checkpointing", "full")
    assert "load" not in run(*job).stdout.replace("offload", "").replace("loads under", "")
    own = (*job, "--engine", "deepspeed", "--zero", "3", "--engine-option", "zero_init=false")
    assert len(re.findall(r" 8[67]\.\d\d  load ", run(*own).stdout)) == 3
    rows = json.loads(run(*own, "--format", "json").stdout)["rows"]
    assert {row["deciding_phase"] for row in rows} == {"load"}


def test_a_single_setup_says_where_loading_decides(run: Run, tmp_path: Path) -> None:
    setup = tmp_path / "setup.yaml"
    setup.write_text(
        "num_gpus: 16\nengine: deepspeed\nzero_stage: 3\ncheckpointing: full\nengine_options:\n  zero_init: false\n"
    )
    shown = run("estimate", "mixtral-8x7b", "--setup", str(setup), "--gpu", "h100")
    assert re.search(
        r"H100-80  does not fit   needs 8[\d.]+-[\d.]+ of 79.2 GiB to load", shown.stdout
    )
    assert " load * " in shown.stdout


def test_a_sweep_says_so_too(run: Run) -> None:
    job = (
        "sweep", "mixtral-8x7b", "--gpus", "16", "--gpu", "h100", "--zero", "3", "--checkpointing", "full",
        "--engine-option", "zero_init=false",
    )  # fmt: skip
    assert re.search(r"ZeRO-3 +87\.0 OOM [\d.]+-[\d.]+ load", run(*job).stdout)
    assert "load 87.0" not in run(*job[:-2]).stdout
