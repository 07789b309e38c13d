import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

Run = Callable[..., Any]
PLAN = ("plan", "llama-3.2-1b", "--gpu", "h100", "--gpus", "8", "--seq-len", "2048")


def rows_of(text: str) -> list[dict[str, Any]]:
    return list(json.loads(text)["rows"])


def test_rows_hold_what_the_plan_adds(run: Run) -> None:
    rows = rows_of(run(*PLAN, "--format", "json").stdout)
    assert [each["rank"] for each in rows] == list(range(1, len(rows) + 1))
    assert {each["verdict"] for each in rows} == {"fits"}
    assert max(each["relative_speed"] for each in rows) == 1
    for each in rows:
        assert each["headroom_bytes"] == each["gpu_capacity_bytes"] - each["total_high_bytes"]
    lines = run(*PLAN, "--format", "csv").stdout.splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].split(",")[0] == "rank"
    assert run(*PLAN, "--format", "markdown").stdout.count("\n") == len(rows) + 2


def test_what_does_not_fit_says_what_would(run: Run) -> None:
    printed = run("plan", "llama-3.1-8b", "--gpu", "a100-40gb", "--gpus", "4,16").stdout
    assert "Does not fit" in printed
    assert " saves " in " ".join(printed.split())


def test_the_objective_and_the_limit(run: Run) -> None:
    command = ("plan", "llama-3.2-1b", "--gpus", "1..4", "--format", "json")
    rows = rows_of(run(*command, "--objective", "gpus", "--limit", "3").stdout)
    assert [each["num_gpus"] for each in rows] == [1, 1, 2][: len(rows)] or rows[0]["num_gpus"] == 1
    assert len(rows) == 3
    command = (*command, "--engine", "deepspeed")
    rows = rows_of(run(*command, "--objective", "batch", "--limit", "1").stdout)
    assert rows[0]["num_gpus"] == 4


@pytest.mark.parametrize(
    ("framework", "options", "read"),
    [
        pytest.param("deepspeed", ("--engine", "deepspeed"), "--deepspeed-config", id="deepspeed"),
        pytest.param("accelerate", ("--engine", "fsdp"), "--accelerate-config", id="accelerate"),
        pytest.param("training-args", ("--engine", "deepspeed"), "--training-args", id="arguments"),
    ],
)
def test_the_chosen_setup_is_written_and_read_back(
    run: Run, tmp_path: Path, framework: str, options: tuple[str, ...], read: str
) -> None:
    path = tmp_path / ("chosen.yaml" if framework == "accelerate" else "chosen.json")
    written = run(*PLAN, *options, "--emit", framework, "--output", str(path))
    assert written.exit_code == 0, written.stderr
    assert written.stdout == ""
    (best, *_) = rows_of(run(*PLAN, *options, "--format", "json").stdout)
    again = run(
        "estimate", "llama-3.2-1b", "--gpus", "8", "--seq-len", "2048", read, str(path),
        "--checkpointing", str(best["checkpointing"]), "--gpu", "h100", "--format", "json",
        *(("--batch-size", str(best["micro_batch_size"])) if framework == "accelerate" else ()),
        *(("--kernels", "liger") if best["other_settings"] == "kernels=liger" else ()),
    )  # fmt: skip
    assert again.exit_code == 0, again.stderr
    (row,) = rows_of(again.stdout)
    if framework != "accelerate":  # which wraps and reduces in its own way
        assert row["peak_bytes"] == best["peak_bytes"]
    assert row["micro_batch_size"] == best["micro_batch_size"]
    assert row["engine"] == best["engine"]


def test_torchtitan_gets_flags_and_notes_go_to_stderr(run: Run) -> None:
    outcome = run(*PLAN, "--engine", "fsdp", "--emit", "torchtitan")
    assert outcome.stdout.startswith("--training.local_batch_size ")
    assert "launch it on 8 GPUs" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("--objective", "speeed"), 3, "Did you mean 'speed'", id="objective"),
        pytest.param(("--headroom", "5"), 2, "write 5% or 0.05", id="headroom"),
        pytest.param(("--engine", "fsdp3"), 3, "Did you mean 'fsdp'", id="engine"),
        pytest.param(("--emit", "deepspede"), 3, "Did you mean 'deepspeed'", id="framework"),
        pytest.param(("--gpu", "h100,a100", "--emit", "deepspeed"), 2, "one GPU", id="two GPUs"),
        pytest.param(("--gpu-memory", "1GiB", "--emit", "deepspeed"), 3, "nothing fits", id="none"),
        pytest.param(
            ("--global-batch-size", "7", "--engine", "deepspeed"), 3, "spread evenly",
            id="global batch",
        ),
        pytest.param(("--pp", "32", "--gpus", "64"), 3, "32 stages are more than the 16 layers", id="stages"),
        pytest.param(("--ep", "8"), 3, "has no experts", id="experts"),
        pytest.param(("--tp", "3", "--gpus", "8"), 3, "3 x 1 x 1 = 3", id="degrees"),
        pytest.param(
            ("--engine", "deepspeed", "--emit", "deepspeed", "--output", "/nonexistent/a.json"),
            3, "cannot be written", id="output",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    outcome = run("plan", "llama-3.2-1b", *arguments)
    assert outcome.exit_code == code
    assert message in outcome.stderr
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1


def test_lower_bounds_make_no_plan(run: Run, tmp_path: Path) -> None:
    """Activations that are not counted: a plan would promise what nobody knows."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "sam2_video"}', encoding="utf-8")
    answer = run("plan", str(config), "--gpu", "a100", "--gpus", "8")
    assert answer.exit_code == 3
    assert "activations of sam2_video" in answer.stderr
    assert "no setup can be said to fit" in answer.stderr
    assert answer.stdout == ""


def test_a_class_that_cannot_checkpoint_is_planned_without(run: Run) -> None:
    asked = ("plan", "xlnet-base-cased", "--gpu", "a100", "--gpus", "1", "--engine", "ddp")
    rows = json.loads(run(*asked, "--format", "json").stdout)["rows"]
    assert {row["checkpointing"] for row in rows} == {"none"}
    refused = run(*asked, "--checkpointing", "full")
    assert refused.exit_code == 3
    assert "xlnet cannot checkpoint its activations" in refused.stderr


def test_lower_bounds_that_are_too_large_still_say_so(run: Run) -> None:
    answer = run("plan", "deepseek-v4-flash", "--gpu", "v100-16gb", "--gpus", "1")
    assert answer.exit_code == 0
    assert "Nothing fits" in answer.stdout


INTERRUPTED = """
import sys, memplan.cli
from memplan.search.planning.finding import Finder
whole, tried = Finder.find, []
def some(self, *asked):
    tried.append(asked)
    if len(tried) > {number}:
        raise KeyboardInterrupt
    return whole(self, *asked)
Finder.find = some
sys.argv[1:] = ["plan", "gpt2", "--gpus", "2", "--gpu", "h100", "--format", "{form}"]
sys.exit(memplan.cli.main())
"""


@pytest.mark.parametrize("form", ["table", "json"])
def test_what_was_found_before_an_interrupt_is_shown(checkout: Path, form: str) -> None:
    code = INTERRUPTED.format(number=3, form=form)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, text=True, capture_output=True, check=False
    )
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr
    if form == "table":
        assert done.stdout.startswith("Fastest: ")
    else:
        assert 0 < len(json.loads(done.stdout)["rows"]) <= 3


def test_an_interrupt_before_anything_is_found_says_nothing(checkout: Path) -> None:
    code = INTERRUPTED.format(number=0, form="table")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, text=True, capture_output=True, check=False
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_of_several_cards_each_has_its_answer_in_the_first_lines(run: Run) -> None:
    told = run("plan", "gpt2", "--gpus", "1", "--gpu", "t4,h100").stdout.splitlines()
    leads = [line.split()[0] for line in told[:6] if line.startswith(("T4  ", "H100-80  "))]
    assert leads == ["H100-80", "T4"], "the faster card first, whatever was named first"
    assert told[0].startswith("H100-80  Fastest: ")
    assert len([line for line in told if line.startswith("Fastest first")]) == 1
