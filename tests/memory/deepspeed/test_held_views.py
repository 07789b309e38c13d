"""What outlives its release under stage 3, since autograd holds a view of it."""

from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.job import prepared
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

MINIMAX: dict[str, Any] = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 3,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
    "num_experts_per_tok": 8, "vocab_size": 200064, "rotary_dim": 64, "max_position_embeddings": 196608,
}  # fmt: skip
SETUP: dict[str, Any] = {
    "engine": "deepspeed", "zero_stage": 3, "num_gpus": 4, "precision": "fp16-master", "seq_len": 96,
    "micro_batch_size": 3, "gradient_accumulation_steps": 3, "optimizer": "adagrad",
    "engine_options": {"zero_init": False},
}  # fmt: skip
REQUESTED = {"forward": 15_069_243_537, "backward": 15_839_254_145}
"""Peaks of three steps of PyTorch 2.13's CUDA build with DeepSpeed 0.19.8, A100, rank 0."""


def test_experts_are_held_until_their_products_backward_pass() -> None:
    """``grouped_mm`` is given them turned (transformers, ``_grouped_linear``), and gathers them once more in backward:
    released like other weights they would be 3.9 and 5.7 % less."""
    model, gpu = load_model(MINIMAX, "causal-lm"), load_gpu("a100-sxm4-80gb")
    phases = estimate(model, TrainingSetup(**SETUP), gpu, rank=0).phases
    for name, measured in REQUESTED.items():
        assert phases[name].peak_bytes == pytest.approx(measured, rel=3e-6)


@pytest.mark.parametrize(("model_type", "is_whole"), [("qwen3_moe", True), ("qwen3_next", False)])
def test_which_mixtures_are_taken_as_a_whole(model_type: str, *, is_whole: bool) -> None:
    """Three classes alone, by their full names (DeepSpeed 0.19.8, runtime/zero/leaf_module_config.py): of Qwen3-Next
    PyTorch's CUDA build gathers experts, gate and shared expert each by itself."""
    config = {
        "model_type": model_type, "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "vocab_size": 1000, "num_key_value_heads": 2,
    }  # fmt: skip
    setup = TrainingSetup(engine="ddp", seq_len=64)  # type: ignore[arg-type]
    tape = prepared(
        load_model(config, "causal-lm"), setup.resolve(4096, has_bf16=True), None
    ).rank_input.tape
    assert any(segment.sealed for segment in tape.segments) is is_whole
