"""What single operations keep: the lessons are read off the tape, and say what textbooks say."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.errors import UsageError
from memplan.report.explain_operation import conclusions, lesson_rows
from memplan.report.lessons import (
    HEADS,
    HIDDEN,
    LESSONS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Taught,
    find_lesson,
    teach,
)
from memplan.units import GIB

X = 2 * TOKENS * HIDDEN
"""One tensor of hidden states in bf16 [bytes]."""
STATISTIC = 4 * TOKENS
"""One fp32 number a row [bytes]."""


def taught(name: str) -> list[Taught]:
    return [teach(variant) for variant in find_lesson(name).variants]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("add", [0]),
        ("mul", [2 * X]),
        ("square", [X]),
        ("sigmoid", [X]),
        ("silu", [X]),
        ("gelu_new", [4 * X, X]),
        ("dropout", [X // 2]),
        ("linear", [X]),
        ("embedding", [8 * TOKENS]),
        ("softmax", [4 * HEADS * TOKENS**2]),
        ("layer_norm", [X + 2 * STATISTIC]),
        ("rms_norm", [3 * X + STATISTIC, X + STATISTIC]),
        ("attention", [3 * X + 6 * HEADS * TOKENS**2, 4 * X + 4 * HEADS * TOKENS + 1024]),
        ("swiglu", [X + 8 * TOKENS * WIDTH, X + 6 * TOKENS * WIDTH]),
    ],
)
def test_kept(name: str, kept: list[int]) -> None:
    assert [each.kept_bytes for each in taught(name)] == kept


def test_liger_keeps_gradients_and_never_makes_all_logits() -> None:
    eager, megatron, liger = taught("cross_entropy")

    assert liger.kept_bytes == X + 2 * VOCABULARY * HIDDEN
    assert liger.peak_bytes < megatron.peak_bytes < eager.peak_bytes
    logits = TOKENS * VOCABULARY
    assert eager.peak_bytes >= 12 * logits


def test_product_of_sums() -> None:
    """``(x + 1) * (y + 1)`` on 1 GiB tensors: 0, 2 or 1 GiB, as neither, both or one need a gradient."""
    assert [each.kept_bytes for each in taught("product_of_sums")] == [0, 2 * GIB, GIB]


def test_sigmoid_chain() -> None:
    """Five sigmoids hold 4 GiB beside their result."""
    assert taught("sigmoid-chain")[0].kept_beside_output_bytes == 4 * GIB


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_every_lesson_adds_up(lesson: Any) -> None:
    found = [teach(variant) for variant in lesson.variants]

    for each in found:
        assert sum(size for step in each.steps for _, size in step.saves) == each.kept_bytes
        assert each.kept_bytes <= each.peak_bytes
    assert conclusions(lesson, found)[0] == lesson.why
    assert lesson.source
    totals = [row["bytes"] for row in lesson_rows(lesson) if row["keeps"] == "all it keeps"]
    assert totals == [each.kept_bytes for each in found]


def test_unknown_lesson_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no lesson on 'sigmoids'\. Did you mean 'sigmoid'\?"):
        find_lesson("sigmoids")


def test_command(run: Callable[..., Any]) -> None:
    outcome = run("explain", "--operation", "rms-norm")

    assert outcome.exit_code == 0
    assert "keeps 16.01 MiB instead of 48.01 MiB" in outcome.stdout
