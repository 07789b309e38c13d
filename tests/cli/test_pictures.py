"""``--report`` and ``--chart``: files are there whoever reads on, and nothing is passed over."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
JOB = ("gpt2", "--gpu", "t4", "--seq-len", "128")
COMMANDS = [
    ("estimate", *JOB), ("sweep", *JOB, "--batch-size", "1,2"), ("plan", *JOB, "--gpus", "1"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_page_is_written_though_nobody_reads_the_answer(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    with subprocess.Popen(
        [sys.executable, "-m", "memplan", *command, "--report", str(page)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        process.wait(120)
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_the_answer_comes_first_and_the_page_is_named_last(
    command: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    told = run(*command, "--report", str(tmp_path / "page.html"), "--chart")
    lines = told.stdout.splitlines()
    assert "fit" in lines[0] or lines[0].startswith("Fastest: ")
    assert lines[-1].startswith(f"Wrote {tmp_path / 'page.html'}: ")


@pytest.mark.parametrize(
    "command",
    [
        (
            "estimate",
            *JOB,
            "--gpus",
            "2",
            "--zero",
            "2",
            "--offload",
            "none",
            "--emit",
            "deepspeed",
        ),
        ("plan", *JOB, "--gpus", "2", "--engine", "deepspeed", "--emit", "deepspeed"),
    ],
    ids=["estimate", "plan"],
)
@pytest.mark.parametrize(
    "option", [("--chart",), ("--report", "page.html")], ids=["chart", "report"]
)
def test_what_is_written_down_instead_takes_no_pictures(
    command: tuple[str, ...], option: tuple[str, ...], run: Run
) -> None:
    told = run(*command, *option)
    assert told.exit_code == 2
    assert option[0] in told.stderr
    assert not told.stdout


def test_a_drawing_of_two_cards_is_refused_before_they_are_looked_at(run: Run) -> None:
    told = run("plan", "gpt2", "--gpu", "t4,v100", "--report", "page.html")
    assert told.exit_code == 2
    assert not told.stdout
    assert "one GPU" in told.stderr


def test_where_nothing_fits_the_answer_is_given_before_the_page_is_refused(
    run: Run, tmp_path: Path
) -> None:
    told = run(
        "plan",
        "llama-3.1-70b",
        "--gpu",
        "t4",
        "--gpus",
        "1",
        "--report",
        str(tmp_path / "page.html"),
    )
    assert told.exit_code == 3
    assert told.stdout
    assert "nothing to draw" in told.stderr
