"""``memplan flops``, and words that two commands say of one job."""

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("asked", "said", "layers"),
    [
        ("8", "layers.0-7", 8), ("0-7", "layers.0-7", 8), ("0-2,11", "layers.0-2+11", 4), ("0.5", "50%", 6),
        ("full", "full", 12), ("selective", "selective", 0), ("none", "none", 0),
    ],
)  # fmt: skip
def test_checkpointing_by_number_list_and_share(run: Run, asked: str, said: str, layers: int):
    told = run("flops", "gpt2", "--checkpointing", asked)
    assert told.exit_code == 0, told.stderr
    assert f"checkpointing {said}" in flat(told.stdout)
    rows = json.loads(run("flops", "gpt2", "--checkpointing", asked, "--format", "json").stdout)
    (total,) = (row for row in rows["rows"] if row["name"] == "total")
    (logits,) = (row for row in rows["rows"] if row["name"] == "logits")
    assert f"{total['flops'] / 1024 / 10**9:.2f} GFLOP a token" in told.stdout
    layer = (total["forward_flops"] - logits["forward_flops"]) // 12
    if asked != "selective":
        assert total["recomputation_flops"] == layers * layer


def test_products_in_letters(run: Run):
    told = flat(run("flops", "gpt2").stdout)
    for words in (
        "query, key, value 6bsh²", "queries x keys 2bs²h", "scores x values 2bs²h",
        "feed-forward up 8bsh²", "feed-forward down 8bsh²",
    ):  # fmt: skip
        assert words in told
    assert "4bshf (gate and up)" in flat(run("flops", "llama-3.2-1b").stdout)
    assert "in letters" not in flat(run("flops", "t5-small").stdout)


def test_megatrons_own_recomputation_stands_in_the_headline(run: Run):
    job = ("estimate", "gpt2-large", "--engine", "megatron", "--gpus", "8", "--tp", "4")
    assert "no checkpointing" in flat(run(*job).stdout)
    told = flat(run(*job, "--engine-option", "recompute_granularity=full").stdout)
    assert "checkpointing full" in told
    assert "no checkpointing" not in told


def test_estimate_and_plan_count_one_jobs_parameters_alike(run: Run):
    job = ("llama-3.1-8b", "--gpu", "h100", "--gpus", "1", "--lora", "16")
    for command in ("estimate", "plan"):
        told = flat(run(command, *job).stdout)
        assert "8.03B" in told
        assert "6.82M trained" in told
        assert "8.04B" not in told


def test_a_copy_of_a_weight_has_the_weights_sizes(run: Run):
    told = run("explain", "gpt2-xl", "--precision", "bf16-amp", "--format", "json").stdout
    copies = [row for row in json.loads(told)["rows"] if "copy of a weight" in row["path"]]
    assert copies
    assert not any("tokens" in row["formula"] for row in copies)
    assert any(row["formula"].startswith("4,800 x 1,600 x 2 B") for row in copies) or any(
        row["formula"].startswith("1,600 x 4,800 x 2 B") for row in copies
    )


def test_mixed_precision_saves_activations_not_states(run: Run):
    words = "Mixed precision saves activations"
    job = ("sweep", "gpt2", "--engine", "ddp", "--gpus", "2", "--precision")
    assert words in flat(run(*job, "fp32,bf16-amp").stdout)
    assert words not in flat(run(*job, "fp32,bf16").stdout)
    assert words not in flat(run(*job, "bf16,bf16-amp").stdout)
