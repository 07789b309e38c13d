"""Every file that people are meant to copy works as it stands."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import memplan

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parent.parent / "configs"


def names(folder: str) -> list[Any]:
    return [pytest.param(path, id=path.name) for path in sorted((CONFIGS / folder).iterdir())]


def command_of(path: Path, program: str = "memplan") -> list[str]:
    """The command in the comment at a file's top."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return shlex.split(json.loads(text)["_comment"])[1:]
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{program} "))
    command = lines[start]
    while command.endswith("\\"):
        start += 1
        command = command.removesuffix("\\") + lines[start]
    return shlex.split(command)[1:]


@pytest.mark.usefixtures("no_least_capacity")
@pytest.mark.parametrize("path", [*names("sweeps"), *names("setups"), *names("files")])
def test_the_command_at_its_top_runs(
    path: Path, run: Callable[..., Any], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    command = command_of(path)
    assert f"configs/{path.parent.name}/{path.name}" in command
    outcome = run(*command)
    assert outcome.exit_code == 0, outcome.stderr
    assert "GiB" in outcome.stdout


def shell(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a CI file, with this checkout's memplan as the installed one."""
    (folder / "memplan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memplan "$@"\n')
    (folder / "memplan").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(CONFIGS.parent),
        **variables,
    }
    return subprocess.run(
        ["bash", "-e", "-c", script], cwd=CONFIGS.parent, env=environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip


SWEEP = "configs/sweeps/xlm-roberta-xxl.yaml"


ROOT = CONFIGS.parent


def action_step(inputs: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the step of ``action.yml`` that checks, with these inputs over its own defaults."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    assert inputs.keys() <= action["inputs"].keys()
    given = {
        name: inputs.get(name, each.get("default", "")) for name, each in action["inputs"].items()
    }
    step = action["runs"]["steps"][-1]
    environment = {}
    for name, text in step["env"].items():
        known = text.removeprefix("${{ inputs.").removesuffix(" }}")
        assert known in given, f"{name} is no input"
        environment[name] = given.pop(known)
    assert set(given) == {"python"}, "inputs that no step uses"
    scripts = folder / "memplan" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "memplan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memplan "$@"\n')
    (scripts / "memplan").chmod(0o755)
    environment |= {
        "RUNNER_TEMP": str(folder), "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]], cwd=ROOT,
        env={**os.environ, **environment}, text=True, capture_output=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
def test_the_action_runs_as_the_example_asks(tmp_path: Path) -> None:
    workflow = yaml.safe_load((CONFIGS / "ci" / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    (inputs,) = (step["with"] for step in job["steps"] if "memplan" in step["uses"])
    baseline = tmp_path / "baseline.json"
    made = shell(f"memplan sweep {SWEEP} --format json > {baseline}", tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "memplan").unlink()
    done = action_step({**inputs, "sweep": SWEEP, "baseline": str(baseline)}, tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "summary.md").read_text().splitlines()
    assert table[0].startswith("| num gpus | engine |")
    assert len(done.stdout.splitlines()) == 2 + 8 * 2
    assert table[: 2 + 8 * 2] == done.stdout.splitlines()
    assert "rows moved, 0 for the worse" in "\n".join(table[2 + 8 * 2 :])
    assert "::" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"options": "--gpus 1 --gpu t4"}, 5),
        ({"options": "--gpus 1 --gpu t4", "check": "", "summary": "false"}, 0),
        ({"options": "--gpus 8 --gpu h100 --engine fsdp"}, 0),
        ({"options": "--gpus 8 --gpu nonsense"}, 3),
    ],
)
def test_the_action_fails_where_nothing_fits(
    inputs: dict[str, str], code: int, tmp_path: Path
) -> None:
    done = action_step({"sweep": "llama-3.2-1b", **inputs}, tmp_path)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "summary.md").exists() == (inputs.get("summary") != "false")


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
def test_the_action_says_what_turned_and_why(tmp_path: Path) -> None:
    """A peak above the baseline's is an error at the sweep, a flag that changed a warning with both values."""
    sweep = tmp_path / "sweep.yaml"
    text = "version: 1\nmodel: gpt2\nhardware: {gpu: t4}\nsetup: {seq_len: 256}\n"
    sweep.write_text(f"{text}axes: {{micro_batch_size: [4, 64], checkpointing: [none]}}\n")
    baseline = tmp_path / "baseline.json"
    shell(f"memplan sweep {sweep} --format json > {baseline}", tmp_path)
    (tmp_path / "memplan").unlink()
    known = json.loads(baseline.read_text())
    small, _ = known["rows"]
    small["peak_bytes"] -= 2**28
    known["memplan_version"] = "0.0.9"
    baseline.write_text(json.dumps(known))
    sweep.write_text(f"{text}axes: {{micro_batch_size: [4, 96], checkpointing: [none]}}\n")
    inputs = {"sweep": str(sweep), "baseline": str(baseline), "check": "all"}
    done = action_step(inputs, tmp_path)
    assert done.returncode == 5, done.stderr
    lines = done.stderr.splitlines()
    place = f"file={sweep},title=memory%3A"
    (worse,) = (each for each in lines if each.startswith(f"::error {place} worse"))
    assert "batch 4" in worse
    assert "by memplan" in worse
    assert "instead of 0.0.9" in worse
    (changed,) = (each for each in lines if each.startswith(f"::warning {place} not as"))
    assert "micro batch size 64 -> 96" in changed
    (unfit,) = (each for each in lines if each.startswith(f"::error {place} does not fit::"))
    assert "batch 96" in unfit
    assert "OOM, needs " in unfit
    summary = (tmp_path / "summary.md").read_text()
    assert "| num gpus |" in summary
    assert "\n~ 1 GPU, ddp, batch 64, 256 tokens" in summary
    assert "\n::" not in summary


HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
@pytest.mark.parametrize(("batch", "code"), [("4", 0), ("64", 5)])
def test_the_pre_commit_hook_runs(tmp_path: Path, batch: str, code: int) -> None:
    config = yaml.safe_load((CONFIGS / "ci" / "pre-commit-config.yaml").read_text())
    (used,) = config["repos"][0]["hooks"]
    (hook,) = (each for each in HOOKS if each["id"] == used["id"])
    assert hook.keys() >= {"id", "name", "language", "entry", "files"}
    command = shlex.join([*shlex.split(hook["entry"]), *used["args"], "--batch-size", batch])
    done = shell(command, tmp_path)
    assert done.returncode == code, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
def test_the_other_hook_runs(tmp_path: Path) -> None:
    (hook,) = (each for each in HOOKS if each["id"] == "memplan-sweep")
    done = shell(f"{hook['entry']} {SWEEP}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_examples_name_this_version() -> None:
    for path in (CONFIGS / "ci").iterdir():
        assert f"v{memplan.__version__}" in path.read_text(encoding="utf-8"), path.name
