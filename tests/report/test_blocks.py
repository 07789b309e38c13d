"""Tables at any width: nothing is lost, nothing sticks out."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from memplan.report.terminal.blocks import Column, print_blocks

SWEEP = (
    "sweep", "llama-3.2-1b", "--gpus", "8,16", "--zero", "2,3", "--batch-size", "1,2",
    "--seq-len", "4k", "--offload", "none,cpu", "--gpu", "a100-40gb,v100,h100",
)  # fmt: skip
PLAN = (
    "plan", "llama-3.1-8b", "--gpu", "h100", "--gpus", "8,16", "--limit", "4", "--engine", "deepspeed",
)  # fmt: skip
WIDTHS = (40, 47, 60, 80, 120, 200)
CELL = re.compile(r"[\d.]+ (?:fits|tight|OOM) +[\d.,]+-[\d.,]+")


@pytest.fixture
def at_width(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines that a command prints in so many columns."""

    def printed(command: tuple[str, ...], width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        lines: list[str] = run(*command).stdout.splitlines()
        return lines

    return printed


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", [SWEEP, PLAN], ids=["sweep", "plan"])
def test_no_line_is_wider_than_the_terminal(
    at_width: Callable[..., list[str]], command: tuple[str, ...], width: int
) -> None:
    assert max(map(len, at_width(command, width))) <= width


def test_a_sweep_says_the_same_at_every_width(at_width: Callable[..., list[str]]) -> None:
    def cells(width: int) -> list[str]:
        found = CELL.findall("\n".join(at_width(SWEEP, width)))
        return sorted(" ".join(cell.split()) for cell in found)

    widest = cells(WIDTHS[-1])
    assert len(widest) == 3 * 16
    assert all(cells(width) == widest for width in WIDTHS[:-1])


def test_every_block_of_a_plan_names_its_setups(at_width: Callable[..., list[str]]) -> None:
    lines = at_width(PLAN, 40)
    rules = [number for number, line in enumerate(lines) if line.startswith(" ──")]
    labels = [[line[:18] for line in lines[rule + 1 : rule + 5]] for rule in rules]
    assert len(labels) > 1
    assert all(each == labels[0] for each in labels)
    assert [label.split()[0] for label in labels[0]] == ["1", "2", "3", "4"]


def test_a_label_is_folded_at_spaces_alone() -> None:
    label = Column(header=("setup",), cells=("ZeRO-3, cpu optimizer+params",))
    wide = Column(header=("x" * 20,), cells=("",))
    printed = [str(line).strip() for line in print_blocks(40, label, [wide, wide])]
    assert "optimizer+params" in printed
