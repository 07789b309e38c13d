"""Every method beside memplan's, each with what it leaves out."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.formulas import gpu_memory_required
from memplan.graph.counts import count_parameters
from memplan.report.formulas.case import numbers_of
from memplan.report.formulas.methods import compare_methods
from memplan.report.formulas.written import assumed_bytes_line, method_rows, parameter_lines
from memplan.sources.models import load_model
from memplan.training.choices import Recomputation, ZeroStage
from memplan.training.setup import TrainingSetup
from memplan.units import GB

LLAMA = load_model("llama-3.1-8b")


def rows_of(**setup: Any) -> dict[tuple[str, str], Any]:
    rows, refused = compare_methods(LLAMA, [TrainingSetup(**setup)])
    assert not refused
    return {(row.method, row.setting): row for row in rows}


def test_every_row_says_how_by_whom_and_what_it_leaves_out() -> None:
    for row in rows_of(num_gpus=8).values():
        assert row.formula
        assert row.source
        assert row.leaves_out
        assert row.total_bytes >= max(row.states_bytes or 0, row.activations_bytes or 0)


def test_memplan_s_row_is_the_estimate() -> None:
    setup = TrainingSetup(num_gpus=8, zero_stage=ZeroStage.PARAMETERS)
    found = estimate(LLAMA, setup)

    row = rows_of(num_gpus=8, zero_stage=3)["memplan (tape)", "ZeRO-3"]

    assert row.total_bytes == found.peak_bytes
    assert row.activations_bytes == found.activations_bytes


def test_rule_of_thumb() -> None:
    params = count_parameters(LLAMA).total
    rows = rows_of(num_gpus=8)

    by_stage = [rows["rule of thumb", f"ZeRO-{stage}"].total_bytes for stage in range(4)]

    assert by_stage == [16 * params, int(5.5 * params), int(3.75 * params), 2 * params]
    assert rows["16 bytes a parameter", "mixed"].total_bytes == 16 * params


@pytest.mark.parametrize("checkpointing", [Recomputation.NONE, Recomputation.FULL])
def test_article_s_function(checkpointing: Recomputation) -> None:
    rows = rows_of(num_gpus=8, seq_len=2048, checkpointing=checkpointing)
    checkpointed = checkpointing is Recomputation.FULL

    expected = gpu_memory_required(
        count_parameters(LLAMA).total / 10**9, 8, 32, 2048, 1, 4096, 32, 2, checkpointed, 2
    )

    assert rows["rule and textbook", "ZeRO-2"].total_bytes == pytest.approx(expected * GB)


def test_textbook_activations() -> None:
    rows = rows_of(seq_len=2048, precision="bf16")
    layers, sbh = 32, 2048 * 4096
    whole = layers * (34 * sbh + 5 * 32 * 2048**2)

    assert rows["textbook layer", "16-bit"].total_bytes == whole
    assert rows["textbook layer", "p = 2"].total_bytes == whole
    assert (
        rows["textbook layer", "no masks"].total_bytes
        == layers * 2 * (2 * 2048 * 32 + 16 * 4096) * 2048
    )
    assert rows["square-root checkpoints", "every √L-th"].total_bytes == int(
        2 * 32**0.5 * whole / 32
    )


def test_parts_of_a_textbook_layer_add_up_to_it() -> None:
    for precision, p in (("bf16", 2), ("fp32", 4)):
        rows = rows_of(seq_len=2048, precision=precision)
        sbh, scores = 2048 * 4096, 32 * 2048**2
        parts = {name: rows["textbook layer", name].total_bytes // 32 for name in PARTS}
        assert parts == {
            "attention": 5 * p * sbh + sbh + (2 * p + 1) * scores,
            "network": 9 * p * sbh + sbh,
            "norms": 2 * p * sbh,
        }
        assert 32 * sum(parts.values()) == rows["textbook layer", f"p = {p}"].total_bytes
    assert rows["textbook layer", "masked scores"].total_bytes == 32 * 6 * scores


PARTS = ("attention", "network", "norms")


def test_a_form_stands_as_it_is_printed_and_then_as_bytes_of_all_layers() -> None:
    rows = rows_of(seq_len=2048, precision="bf16")
    printed, ours = rows["textbook layer", "as printed"], rows["textbook layer", "no masks"]
    assert printed.formula == "(2sa + 16h)·sb"
    assert printed.total_bytes == (2 * 2048 * 32 + 16 * 4096) * 2048
    assert ours.formula == "L·p(2sa + 16h)·sb"
    assert ours.total_bytes == 32 * 2 * printed.total_bytes


def test_parameters_in_letters() -> None:
    letters, width = parameter_lines(load_model("llama-2-7b"))
    assert "L(4h² + 3hf) + Vh = 6,607,077,376, 98.1% of the model's" in letters
    assert "256·⌈(8h/3)/256⌉ = 11,008, about 8h/3 = 10,923; this model's is 11,008" in width
    (gpt,) = parameter_lines(load_model("gpt2"))
    assert f"12h²L + Vh = {12 * 768**2 * 12 + 50257 * 768:,}" in gpt
    assert parameter_lines(load_model("mixtral-8x7b")) == ()


def test_fp32_has_other_activations() -> None:
    rows = rows_of(seq_len=2048, precision="fp32")
    sixteen, fp32 = rows["textbook layer", "16-bit"], rows["textbook layer", "p = 4"]

    assert fp32.total_bytes > 1.5 * sixteen.total_bytes


def test_deepspeed_s_two_formulas_part_only_on_more_than_one_gpu() -> None:
    alone, eight = rows_of(), rows_of(num_gpus=8)
    documented, current = ("DeepSpeed, documented", "ZeRO-2"), ("DeepSpeed, current", "ZeRO-2")

    assert alone[documented].total_bytes == alone[current].total_bytes
    assert eight[documented].total_bytes > eight[current].total_bytes


def test_a_setup_that_cannot_be_trained_is_said_so() -> None:
    model = load_model("t5-small")
    setup = TrainingSetup(num_gpus=6, num_nodes=1, tensor_parallel=3)
    rows, refused = compare_methods(model, [setup])

    assert len(refused) == 1
    assert all(row.method != "memplan (tape)" for row in rows)


def test_numbers() -> None:
    text = numbers_of(LLAMA, TrainingSetup(num_gpus=8, micro_batch_size=2, seq_len=1024))

    assert "Φ = 8,030,261,248 parameters" in text
    assert "s = 1,024 tokens, b = 2, h = 4,096, a = 32, L = 32, f = 14,336, V = 128,256" in text


def test_other_bytes_a_parameter_are_said_so() -> None:
    assert assumed_bytes_line(TrainingSetup(num_gpus=8)) == ""
    assert assumed_bytes_line(TrainingSetup(precision="fp32")) == ""  # type: ignore[arg-type]
    line = assumed_bytes_line(TrainingSetup(precision="bf16"))  # type: ignore[arg-type]
    assert line.endswith("bf16 with adamw-fused holds 8: weights 2, gradients 2, optimizer 4.")


def test_command(run: Callable[..., Any]) -> None:
    outcome = run("compare", "gpt2", "--gpus", "8", "--format", "json")
    document = json.loads(outcome.stdout)

    rows, _ = compare_methods(
        load_model("gpt2"), [TrainingSetup(num_gpus=8, zero_stage=stage) for stage in ZeroStage]
    )
    assert document["rows"] == method_rows(rows)
    assert [row["setting"] for row in document["rows"][:4]] == [f"ZeRO-{n}" for n in range(4)]


def test_all_models_can_be_compared(run: Callable[..., Any]) -> None:
    for name in ("t5-small", "mixtral-8x7b", "bert-tiny", "qwen1.5-moe-a2.7b"):
        assert run("compare", name, "--seq-len", "128").exit_code == 0
        assert run("flops", name, "--seq-len", "128").exit_code == 0


def test_megatron_s_report_is_of_its_own_degrees() -> None:
    """Under its engine: 18 bytes a parameter of a rank, ``sbh(10 + 24/t)`` without sequence parallel."""
    degrees = {"num_gpus": 4, "engine": "megatron", "tensor_parallel": 4, "seq_len": 4096}
    row = rows_of(**degrees)["Megatron's report", "none"]
    assert row.formula.startswith("18Φ")
    layers = 32 * 4096 * 4096 * (10 + 24 / 4)
    embedded = 8 * 4096 + 4096 * 4096
    head = 2 * (4096 * 128256 / 4 + 4096 * 4096)
    assert row.activations_bytes == int(1.05 * (layers + embedded + head))
