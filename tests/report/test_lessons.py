"""What single operations keep: the lessons are read off the tape, and say what textbooks say."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.errors import UsageError
from memplan.report.lessons.explain_operation import conclusions, lesson_rows
from memplan.report.lessons.lesson_names import find_lesson
from memplan.report.lessons.teaching import USUAL, Sizes, Taught, teach
from memplan.report.lessons.written import LESSONS
from memplan.units import GIB

TOKENS, HIDDEN, WIDTH = USUAL.tokens, USUAL.hidden, USUAL.width
HEADS, VOCABULARY = USUAL.heads, USUAL.vocabulary
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
        ("exp", [X]),
        ("reciprocal", [X]),
        ("sigmoid_written_out", [2 * X, 2 * X, X, X]),
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


def test_own_sizes(run: Callable[..., Any]) -> None:
    printed = run(
        "explain", "--operation", "softmax", "--seq-len", "4k", "--batch-size", "2"
    ).stdout
    assert "2 sequences of 4,096 tokens" in printed
    assert "4.00 GiB  its result" in printed
    own = run("explain", "llama-3.1-8b", "--operation", "swiglu").stdout
    assert "feed-forward 14,336, 32 heads, vocabulary 128,256" in own


def test_sizes_that_a_lesson_does_not_have_are_refused(run: Callable[..., Any]) -> None:
    done = run("explain", "--operation", "sigmoid-chain", "--seq-len", "4k")
    assert done.exit_code == 2
    assert "tensors of 1 GiB" in done.stderr
    done = run("explain", "--operation", "mul", "--zero", "3")
    assert (done.exit_code, "--zero" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("relu", ["its result (_saved_result)"]),
        ("silu", ["its input (_saved_self)"]),
        ("mul", ["the first factor, its input (_saved_self)",
                 "the second factor, its input (_saved_other)"]),
        ("linear", ["its input (_saved_self)"]),
        ("embedding", ["its input (_saved_indices)"]),
        ("dropout", ["its result (_saved_result1)"]),
        ("layer_norm", ["its input (_saved_input)", "its result (_saved_result1)",
                        "its result (_saved_result2)"]),
    ],
)  # fmt: skip
def test_names_are_autograds(name: str, kept: list[str]) -> None:
    """As ``dir(y.grad_fn)`` lists them in torch 2.13."""
    (step,) = taught(name)[0].steps
    assert [what for what, _ in step.saves] == kept


def test_which_factor_a_product_keeps() -> None:
    one_sided = taught("product_of_sums")[2]
    assert [what for step in one_sided.steps for what, _ in step.saves] == [
        "the second factor, the result of add_scalar (_saved_other)"
    ]


def test_the_forward_pass_alone() -> None:
    """``add`` makes one tensor beside its two inputs; the softmax of scores a copy and its result."""
    assert taught("add")[0].forward_peak_bytes == 3 * X
    for lesson in LESSONS:
        for each in taught(lesson.name):
            assert 0 < each.forward_peak_bytes <= each.peak_bytes


def test_sizes_of_ones_own(run: Callable[..., Any]) -> None:
    """A sigmoid on 1 GiB: written out two tensors last beside x, in place the third is never made."""
    answer = run(
        "explain",
        "--operation",
        "sigmoid-written-out",
        "--shape",
        "512x1024x1024",
        "--dtype",
        "fp16",
    )
    assert "tensors of 512 x 1024 x 1024 in fp16: 1.00 GiB" in answer.stdout
    sizes = Sizes.of((512, 1024, 1024), DType.FP16)
    written, in_place, operator, function = (
        teach(each, sizes) for each in find_lesson("sigmoid_written_out").variants
    )
    assert [each.kept_bytes for each in (written, in_place, operator, function)] == [
        2 * GIB, 2 * GIB, GIB, GIB,
    ]  # fmt: skip
    assert operator.kept_beside_output_bytes == function.kept_beside_given_bytes == 0
    peaks = [each.forward_peak_bytes for each in (written, in_place, operator, function)]
    beside_x = [peak - GIB for peak in peaks]
    assert beside_x == [3 * GIB, 2 * GIB, GIB, 2 * GIB]
    large = run(
        "explain", "--operation", "sigmoid-chain", "--shape", "1024x1024", "--dtype", "bf16"
    )
    assert "tensors of 1024 x 1024 in bf16" in large.stdout
    assert "8.00 MiB beside its result" in large.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--operation", "exp", "--shape", "512by2"), "are no sizes of a tensor"),
        (("--operation", "exp", "--shape", "0x2"), "are no sizes of a tensor"),
        (("--operation", "exp", "--dtype", "bf17"), "Did you mean 'bf16'?"),
        (("--operation", "exp", "--shape", "2x2", "--seq-len", "4"), "--shape makes no use of"),
        (("gpt2", "--shape", "2x2"), "means nothing without --operation"),
    ],
)
def test_sizes_that_are_none(run: Callable[..., Any], options: tuple[str, ...], words: str) -> None:
    refused = run("explain", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr


SAVED = {
    "exp": "its result (_saved_result)", "neg": "nothing", "gelu": "its input (_saved_self)",
    "sqrt": "its result (_saved_result)", "layer_norm": "its input (_saved_input), its result (_saved_result1), "
    "its result (_saved_result2)",
    "where": "its input (_saved_condition)", "masked_fill": "its input (_saved_mask)",
    "bmm": "its input (_saved_self), its input (_saved_mat2)",
}  # fmt: skip


def test_every_operator_of_the_table_can_be_looked_up(run: Callable[..., Any]) -> None:
    rows = json.loads(run("explain", "--operation", "all", "--format", "json").stdout)["rows"]
    found = {row["lesson"]: row["keeps"] for row in rows}
    assert {name: found[name] for name in SAVED} == SAVED
    assert len(found) > 35
    # What the table records without a gradient is no answer to the question.
    assert "cos" not in found
    told = run("explain", "--operation", "torch.bmm", "--shape", "8x64x64").stdout
    assert "_saved_mat2" in told
    assert run("explain", "--operation", "all").exit_code == 0


def test_a_convolution_keeps_input_and_weight() -> None:
    (found,) = taught("convolution")
    assert found.kept_bytes == X
    (step,) = found.steps
    assert step.saves == (("its input (_saved_input)", X),)
