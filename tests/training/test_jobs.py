"""Jobs, averages and lengths as values: what is read, what is refused, what they hold."""

from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.training.averaging import Ema
from memplan.training.jobs import Job, JobKind, OtherModel
from memplan.training.lengths import Lengths
from memplan.training.setup import TrainingSetup

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 3000,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def estimate(**fields: Any) -> memplan.Estimate:
    return memplan.estimate(
        SMALL, TrainingSetup(**{"seq_len": 256, "precision": "bf16", **fields}), gpu="h100"
    )


def other_models(found: memplan.Estimate) -> int:
    return found.account.peak.components.get("other_models", 0)


@pytest.mark.parametrize("text", ["dpo", "grpo:rollout=vllm,sleep=2", "ppo:critic=gpt2"])
def test_a_job_is_written_as_it_is_read(text: str) -> None:
    assert str(Job.read(text)) == text
    assert Job.read(str(Job.read(text))) == Job.read(text)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("dpoo", "Did you mean 'dpo'"),
        ("dpo:referense=same", "Did you mean 'reference'"),
        ("sft:reference=same", "sft has none; it is a setting of dpo"),
        ("dpo:teacher=same", "dpo has none; it is a setting of distillation"),
        ("grpo:gpu_memory_utilization=0.3", "only a colocated rollout engine"),
        ("grpo:rollout=vllm,gpu_memory_utilization=30", "above 0 and below 1"),
        ("grpo:rollout=vllm,sleep=3", "sleep: must be 0, 1 or 2"),
        ("dpo:beta", "not KEY=VALUE"),
        ("sft:eval_batch_size=3", "a setting of its own: `evaluation=3`"),
        ("sft:eval_batches_kept=3", "a setting of its own, which takes batches_kept=3"),
        (7, "expected a kind"),
    ],
)
def test_what_cannot_be_is_refused(value: object, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        TrainingSetup(job=value)  # type: ignore[arg-type]


def test_the_reference_is_the_adapter_switched_off() -> None:
    assert Job.read("dpo").other("reference", has_adapter=True) is OtherModel.ADAPTER_OFF
    adapter = {"lora": {"rank": 4, "targets": "all-linear"}}
    assert other_models(estimate(job="dpo", adapter=adapter)) == 0
    assert other_models(estimate(job="dpo:reference=same", adapter=adapter)) > 0
    with pytest.raises(SetupError, match="needs an adapter"):
        estimate(job="dpo:reference=adapter-off")


def test_a_frozen_reference_is_a_copy_of_the_weights() -> None:
    found = estimate(job="dpo")
    held = found.account.peak.components
    weights = held["parameters"]
    assert other_models(found) == weights + held["buffers"]
    assert other_models(estimate(job="dpo:reference=precomputed")) == 0
    assert other_models(estimate(job="dpo:frozen_dtype=fp32")) == pytest.approx(
        2 * weights, rel=2e-4
    )
    assert estimate(job="dpo").peak_bytes > estimate(job="dpo:reference=precomputed").peak_bytes


def test_engines_that_shard_shard_the_reference() -> None:
    whole = other_models(estimate(job="dpo", num_gpus=8, zero_stage=2, precision=None))
    cut = other_models(estimate(job="dpo", num_gpus=8, zero_stage=3, precision=None))
    assert cut == pytest.approx(whole / 8, rel=0.02)


def test_pairs_are_twice_as_many_sequences() -> None:
    pairs = estimate(job="simpo", micro_batch_size=2)
    assert pairs.activations_bytes > 1.9 * estimate(job="simpo").activations_bytes
    assert estimate(job="reward").num_params == estimate().num_params - 3000 * 256 + 256


def test_a_rollout_engine_takes_its_share() -> None:
    awake = estimate(job="grpo:rollout=vllm,gpu_memory_utilization=0.25")
    card = awake.gpu
    assert card is not None
    share = int(0.25 * card.capacity_bytes)
    assert awake.account.peak.components["rollout_engine"] == share
    asleep = estimate(job="grpo:rollout=vllm,gpu_memory_utilization=0.25,sleep=2")
    assert "rollout_engine" not in asleep.phases["backward"].components
    assert asleep.phases["generation"].components["rollout_engine"] == share
    elsewhere = estimate(job="grpo:rollout=server")
    assert "rollout_engine" not in elsewhere.phases["generation"].components
    nowhere = memplan.estimate(SMALL, TrainingSetup(seq_len=256, job="grpo:rollout=vllm"))  # type: ignore[arg-type]
    assert "name a GPU" in " ".join(nowhere.left_out_notes)


def test_generation_caches_keys_and_values() -> None:
    found = estimate(job="grpo:completion_length=192,rollout_batch_size=8")
    cache = 8 * 256 * 2 * (64 + 64) * 2  # sequences, tokens, heads, key and value, bf16
    assert found.phases["generation"].components["rollout_engine"] == pytest.approx(5 * cache)


def test_evaluation_keeps_logits() -> None:
    few = estimate(evaluation=4).phases["evaluation"].peak_bytes
    many = estimate(evaluation="4:batches_kept=100").phases["evaluation"]
    logits = 100 * 4 * 256 * 3000 * 2
    assert many.peak_bytes >= 2 * logits > few


def test_other_models_by_name() -> None:
    found = estimate(job="distillation:teacher=gpt2")
    assert other_models(found) == pytest.approx(124439808 * 2)
    assert any("teacher model: gpt2" in text for text in found.assumptions)


def test_a_model_without_a_language_head_is_refused() -> None:
    with pytest.raises(SetupError, match="no decoder"):
        memplan.estimate("bert-base", TrainingSetup(job="dpo"))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="no decoder"):
        memplan.estimate("t5-small", TrainingSetup(job="grpo"))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["weights", "fp32", "bf16@cpu"])
def test_an_average_is_written_as_it_is_read(text: str) -> None:
    assert str(Ema.read(text)) == text


def test_an_average_is_a_copy() -> None:
    plain, averaged = estimate(), estimate(ema="weights")
    weights = plain.account.peak.components["parameters"]
    assert averaged.account.peak.components["averaged_weights"] == weights
    assert averaged.peak_bytes == plain.peak_bytes + weights
    offloaded = estimate(ema="fp32@cpu")
    assert offloaded.peak_bytes == plain.peak_bytes
    assert offloaded.host_bytes > plain.host_bytes
    with pytest.raises(SetupError, match="Did you mean 'bf16'"):
        estimate(ema="bf166")


@pytest.mark.parametrize(
    "text", ["512:60%,1024:30%,4096:10%", "64:50%,128:50%,packed", "64:25%,128:75%,multiple=8"]
)
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert Lengths.read(str(Lengths.read(text))) == Lengths.read(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("512:60%", "add up to 60.0%"),
        ("512:60%,p50=10", "one of them"),
        ("p50=512,p95=1024", "max="),
        ("p50=512,p95=256,max=1024", "shorter than a lower"),
        ("512:100%,pakced", "Did you mean 'packed'"),
        ("512:x", "expected a share"),
        ("", "one of them"),
    ],
)
def test_lengths_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Lengths.read(text)


def test_the_longest_batch_counts() -> None:
    found = estimate(lengths="64:90%,512:10%,multiple=128", seq_len=None)
    assert found.setup.seq_len == 512
    assert found.peak_bytes == estimate(seq_len=512).peak_bytes
    assert estimate(lengths="64:90%,512:10%", seq_len=100).setup.seq_len == 100
    assert estimate(lengths="64:90%,512:10%,packed", seq_len=100).setup.seq_len == 100


def test_kinds_are_all_read() -> None:
    for kind in JobKind:
        assert estimate(job=kind.value).peak_bytes > 0


TORCHTUNES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
MEASURED = {"forward": 4_196_043_036, "backward": 4_194_945_384}
"""Requested bytes of the third step on PyTorch's CUDA build without a card: fp32 logits, ``logits_to_logprobs`` of torchtune 0.6.1,
logits let go before backward as its recipes do. (An earlier script's were 64 MiB more, two cuBLAS workspaces to 68 bytes; run again
there are two of these in all, one for each direction, as everywhere.)"""


def test_log_probabilities_of_fp32_logits_at_once() -> None:
    job = {"kind": "dpo", "reference": "precomputed", "log_probabilities": "whole"}
    setup = TrainingSetup(
        engine="ddp", precision="bf16", micro_batch_size=4, seq_len=1024, optimizer="sgd", job=job
    )
    phases = memplan.estimate(TORCHTUNES, setup, gpu="h100-80gb").phases
    for name, measured in MEASURED.items():
        assert phases[name].peak_bytes == pytest.approx(measured, rel=0.00005)
