"""``sweep --jobs``: nothing is left of it, however it ends, and what a lost process leaves is told."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROC = Path("/proc")
PATIENCE_S = 30.0
"""Longest that anything here may take on a busy machine."""

pytestmark = pytest.mark.skipif(
    not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc"
)


def sweeping(*options: str) -> list[str]:
    """A sweep that takes longer than the test."""
    lengths = ",".join(map(str, range(256, 2048, 8)))
    return [
        *(sys.executable, "-m", "memplan", "sweep", "gpt2-xl", "--gpus", "8", "--zero", "3"),
        *(
            "--seq-len",
            lengths,
            "--batch-size",
            "1,2,3,4,5,6,7,8",
            "--gpu",
            "a100-80gb",
            "--jobs",
            "2",
        ),
        *options,
    ]


def family(process: int) -> set[int]:
    """Its children and theirs."""
    parents: dict[int, int] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found, level = set[int](), {process}
    while level:
        level = {each for each, parent in parents.items() if parent in level}
        found |= level
    return found


def is_running(process: int) -> bool:
    try:
        state = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(what: str, holds: object) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


@contextmanager
def running(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A sweep whose processes have answered something, and where its rows go."""
    answers = tmp_path / "rows.csv"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with answers.open("wb") as rows:
        process = subprocess.Popen(
            sweeping("--format", "csv", *options),
            stdout=rows,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
    try:
        wait_for(
            "there are rows",
            lambda: process.poll() is not None or answers.stat().st_size > 4000,
        )
        assert process.poll() is None
        yield process, answers
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL", "SIGHUP"])
def test_no_process_outlives_the_first(name: str, tmp_path: Path):
    with running(tmp_path) as (process, _):
        others = family(process.pid)
        assert len(others) >= 2
        process.send_signal(getattr(signal, name))
        process.wait(PATIENCE_S)
        wait_for("all have ended", lambda: not any(map(is_running, others)))


def test_a_process_that_is_ended_is_one_line_beside_the_rows_so_far(tmp_path: Path):
    with running(tmp_path) as (process, answers):
        os.kill(max(family(process.pid)), signal.SIGKILL)
        _, remarks = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 6
        assert remarks.count(b"\n") == 1
        assert remarks.startswith(
            b"memplan: error: --jobs: one of the processes was ended by SIGKILL"
        )
        header, *rows = answers.read_text().splitlines()
        assert len(rows) > 2
        assert {row.count(",") for row in rows} == {header.count(",")}
