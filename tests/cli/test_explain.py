"""``memplan explain`` as a user types it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
JOB = ("explain", "llama-3.2-1b", "--precision", "bf16", "--gpu", "v100-16gb")


SCREEN_LINES = 24


def test_the_verdict_and_the_fix_come_first(run: Run) -> None:
    lines = run(*JOB).stdout.splitlines()
    assert re.fullmatch(r"V100-16  does not fit   needs [\d.]+-[\d.]+ of 15.8 GiB", lines[0])
    assert lines[1].startswith("    to fit: --checkpointing full (")
    job = next(line for line in lines if line.startswith("llama-3.2-1b"))
    assert job.startswith("llama-3.2-1b (causal-lm) · 1.24B · 1 GPU · bf16 · 2,048 tokens")


@pytest.mark.parametrize("job", [
    JOB, ("explain", "t5-3b"), ("explain", "mixtral-8x7b", "--gpus", "8", "--zero", "3", "--checkpointing", "full"),
    ("explain", "llama-3.1-8b", "--gpus", "8", "--engine", "fsdp", "--lora", "8"),
])  # fmt: skip
@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_a_screen_and_adds_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, job: tuple[str, ...], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run(*job).stdout.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= width
    bars = [re.fullmatch(r" ([a-z' ]+?) +([\d.,]+) +(\d+)% .*", line) for line in lines]
    figures = {bar[1]: float(bar[2].replace(",", "")) for bar in bars if bar is not None}
    shares = [int(bar[3]) for bar in bars if bar is not None]
    assert 97 <= sum(shares) <= 103
    assert "parameters" in figures
    (needs,) = (line for line in lines if line.startswith(" needs "))
    together = float(needs.split(" = ")[1].split()[0].replace(",", ""))
    assert sum(figures.values()) == pytest.approx(together, abs=0.06)
    assert needs.split()[1] in lines[0]
    assert run(*job, "--full", "--format", "json").exit_code == 2  # which is for people


def test_components_are_explained_by_name(run: Run) -> None:
    shown = run(*JOB, "--component", "activations,optimizer-states").stdout
    assert re.search(r"^activations: [\d.]+ GiB, \d+% of what is allocated", shown, re.MULTILINE)
    assert re.search(r"^optimizer states: [\d.]+ GiB", shown, re.MULTILINE)
    assert "decoder.layers keeps " in shown
    assert "gradients:" not in shown
    assert "other models: none in this setup" in run(*JOB, "--component", "averaged_weights", "--component",
                                                "other-models").stdout  # fmt: skip


def test_a_component_that_is_nearly_one_is_refused(run: Run) -> None:
    done = run(*JOB, "--component", "activatoins")
    assert done.exit_code == 2
    assert "there is no component 'activatoins'. Did you mean 'activations'?" in done.stderr


def test_the_step_over_time_and_everything(run: Run) -> None:
    drawn, full = run(*JOB, "--timeline").stdout, run(*JOB, "--full").stdout
    assert "long: the whole run" in drawn
    assert "▼ peak" in drawn
    assert "▼ peak" in full
    for text in (drawn, full):
        assert text.startswith("V100-16  does not fit ")
    assert len(full.splitlines()) > 100
    assert run(*JOB, "--full", "--timeline").exit_code == 2


def test_versus_says_where_it_went(run: Run) -> None:
    done = run(*JOB, "--versus", "--zero 3")
    assert done.exit_code == 2
    assert 'Two setups are compared by `memplan compare MODEL --vs "--zero 3"`.' in done.stderr


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
