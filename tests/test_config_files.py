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


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
def test_the_github_actions_job_runs(tmp_path: Path) -> None:
    workflow = yaml.safe_load((CONFIGS / "ci" / "github-actions.yml").read_text())
    assert workflow.keys() >= {"name", "env", "jobs"}
    (job,) = workflow["jobs"].values()
    lines = [step["run"] for step in job["steps"] if "memplan sweep" in step.get("run", "")]
    assert len(lines) == 3
    baseline, summary = tmp_path / "baseline.json", tmp_path / "summary.md"
    made = shell(f"memplan sweep {SWEEP} --format json > {baseline}", tmp_path)
    assert made.returncode == 0, made.stderr
    variables = {"SWEEP": SWEEP, "BASELINE": str(baseline), "GITHUB_STEP_SUMMARY": str(summary)}
    for line in lines:
        done = shell(line, tmp_path, **variables)
        assert done.returncode == 0, done.stderr
    table = summary.read_text().splitlines()
    assert table[0].startswith("| num_gpus | engine |")
    assert len(table) == 2 + 8 * 2


@pytest.mark.skipif(os.name == "nt", reason="runs a shell")
@pytest.mark.parametrize(("batch", "code"), [("4", 0), ("64", 5)])
def test_the_pre_commit_hook_runs(tmp_path: Path, batch: str, code: int) -> None:
    config = yaml.safe_load((CONFIGS / "ci" / "pre-commit-config.yaml").read_text())
    (hook,) = config["repos"][0]["hooks"]
    assert hook.keys() >= {"id", "name", "language", "entry", "files"}
    done = shell(f"{hook['entry']} --batch-size {batch}", tmp_path)
    assert done.returncode == code, done.stderr
