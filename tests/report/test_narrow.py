"""Every command at any width: nothing is cut off, nothing sticks out."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

COMMANDS = {
    "compare": ("compare", "llama-3.2-1b"),
    "flops": ("flops", "llama-3.2-1b"),
    "models": ("models", "qwen2"),
    "model": ("models", "llama-3.2-1b"),
    "gpus": ("gpus",),
    "gpu": ("gpus", "a100"),
    "ranks": ("estimate", "llama-3.2-1b", "--gpus", "8", "--zero", "2", "--per-rank"),
    "explain": ("explain", "llama-3.2-1b", "--gpus", "8", "--gpu", "v100-16gb"),
    "operation": ("explain", "--operation", "attention"),
    "versus": ("compare", "llama-3.2-1b", "--gpu", "v100", "--vs", "--seq-len 1024"),
    "account": ("estimate", "llama-3.2-1b", "--gpu", "v100,h100"),
    "pivot": ("sweep", "llama-3.2-1b", "--gpus", "8", "--zero", "0-3", "--gpu", "a100", "--pivot",
              "peak,setup,gpu"),
}  # fmt: skip


def printed(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    lines: list[str] = run(*COMMANDS[name]).stdout.splitlines()
    return lines


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_too_long_or_cut(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    lines = printed(run, monkeypatch, name, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("name", ["compare", "flops", "gpus", "ranks"])
def test_every_figure_is_there_when_it_is_narrow(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def figures(width: int) -> Counter[str]:
        text = " ".join(printed(run, monkeypatch, name, width))
        return Counter(re.findall(r"(?<![\w.-])~?\d+\.\d+(?![\w.-])", text))

    wide, narrow = figures(110), figures(40)
    assert wide
    assert not wide - narrow
