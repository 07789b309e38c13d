"""No table has a word that ``--legend`` does not explain."""

from typing import TYPE_CHECKING, Any

import pytest

from memplan.estimator import Verdict
from memplan.memory.account import ComponentKind, Lifetime
from memplan.report.estimates import times
from memplan.report.plans import table as plan_report
from memplan.report.terminal.legend import LEGEND, words_of_legend
from memplan.training.precision import Precision
from tests.report.tables import answers, comparison, plan

if TYPE_CHECKING:
    from memplan.report.terminal.blocks import Column

WORDS = words_of_legend()
USUAL = {
    "precision",
    "tokens",
    "layers",
    "params",
    "run days",
    "GPU-hours",
    "cost",
    "MFU %",
    "HFU %",
}
"""What everybody calls so."""


def headers() -> set[str]:
    """Of a comparison, of a plan, and of times."""
    columns: list[Column] = [*comparison()]
    found = {column.name for column in columns}
    found |= {" ".join(header) for header in plan_report._columns(plan())}
    found |= {" ".join(header) for header in times._STEP_COLUMNS}
    return found


def test_there_is_a_word_for_every_header() -> None:
    for header in headers() - USUAL:
        bare = header.removesuffix(" GiB").removesuffix(" s")
        known = any(word in (bare, header) or bare.startswith(word) for word in WORDS)
        assert known or bare.split(" of ")[0] in cards(), header


def cards() -> set[str]:
    return {each.gpu.short_name for each in answers() if each.gpu is not None}


@pytest.mark.parametrize("kind", ComponentKind)
def test_there_is_a_word_for_every_component(kind: ComponentKind) -> None:
    assert kind.label.replace("_", " ") in WORDS


@pytest.mark.parametrize("word", [*Verdict, *Precision, *Lifetime])
def test_there_is_a_word_for_every_verdict_precision_and_lifetime(word: Any) -> None:
    assert word.value in WORDS


@pytest.mark.parametrize(
    "command",
    [
        ("estimate", "gpt2"), ("estimate", "gpt2", "--gpus", "8"), ("sweep", "gpt2", "--gpu", "t4"),
        ("explain", "gpt2"), ("compare", "gpt2", "--vs", "--batch-size 2"),
        ("plan", "gpt2", "--gpus", "1", "--gpu", "t4", "--checkpointing", "none"),
    ],
)  # fmt: skip
def test_commands_explain_their_words(run: Any, command: tuple[str, ...]) -> None:
    plain, explained = run(*command).stdout, run(*command, "--legend").stdout
    for words in LEGEND.values():
        for word in words:
            assert f"  {word}: " in explained
            assert f"  {word}: " not in plain
    assert run(*command, "--legend", "--format", "json").exit_code in (0, 2)


def test_words_stand_once() -> None:
    listed = [word for group in LEGEND.values() for entry in group for word in entry.split(", ")]
    assert len(set(listed)) == len(listed)
