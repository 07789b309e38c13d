"""What torch's and transformers' own code refuses is refused, with a line that says so."""

from dataclasses import replace
from typing import Any

import pytest

from memplan.errors import ConfigError, InputError, SetupError
from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

LLAMA: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 800,
}  # fmt: skip
BLOOM: dict[str, Any] = {
    "model_type": "bloom", "hidden_size": 256, "n_layer": 1, "n_head": 4, "vocab_size": 800,
}  # fmt: skip
GPT: dict[str, Any] = {
    "model_type": "openai-gpt", "n_embd": 256, "n_layer": 1, "n_head": 4, "vocab_size": 800,
}  # fmt: skip


def peak(config: dict[str, Any], **fields: Any) -> int:
    setup = TrainingSetup(seq_len=64, **fields)
    return estimate(load_model(config, "causal-lm"), setup, load_gpu("a100-80gb")).peak_bytes


def test_a_class_without_sdpa_is_not_asked_for_it() -> None:
    assert peak(BLOOM) == peak(BLOOM, attention="eager")
    with pytest.raises(SetupError, match="class of bloom raises"):
        peak(BLOOM, attention="sdpa")


DEEPSEEK_V32: dict[str, Any] = {
    "model_type": "deepseek_v32", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 512, "vocab_size": 800, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "index_topk": 32,
}  # fmt: skip


def test_a_class_without_flash_is_not_asked_for_it() -> None:
    """``_supports_flash_attn = False`` (transformers 5.23, modeling_deepseek_v32.py)."""
    assert peak(DEEPSEEK_V32, precision="bf16")
    with pytest.raises(SetupError, match=r"flash: .*deepseek_v32 raises.*choose sdpa or eager"):
        peak(DEEPSEEK_V32, attention="flash", precision="bf16")
    with pytest.raises(SetupError, match="choose eager"):
        peak(BLOOM, attention="flash", precision="bf16")


BIGBIRD_PEGASUS: dict[str, Any] = {
    "model_type": "bigbird_pegasus", "d_model": 64, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "vocab_size": 500, "max_position_embeddings": 1024, "block_size": 16, "num_random_blocks": 3,
}  # fmt: skip


def test_blocks_do_not_run_under_autocast() -> None:
    """``scatter_`` of 16 bits into fp32 (transformers 5.23, modeling_bigbird_pegasus.py); BigBird's own does."""
    model, gpu = load_model(BIGBIRD_PEGASUS, "seq2seq-lm"), load_gpu("a100-80gb")
    short = TrainingSetup(seq_len=128, target_seq_len=16, precision="bf16-amp")
    assert estimate(model, short, gpu).peak_bytes
    with pytest.raises(InputError, match="raises under autocast"):
        estimate(model, replace(short, seq_len=512), gpu)


def test_gpt_cannot_checkpoint() -> None:
    assert peak(GPT)
    with pytest.raises(SetupError, match="cannot checkpoint"):
        peak(GPT, checkpointing="full")


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [
        ("llama", True),
        ("gemma2", True),
        ("gemma3_text", True),
        ("mistral", False),
        ("gemma", False),
    ],
)
def test_heads_that_do_not_fill_the_hidden_size(model_type: str, refused: bool) -> None:
    config = {**LLAMA, "model_type": model_type, "num_attention_heads": 6, "head_dim": 64}
    if not refused:
        assert load_model(config, "causal-lm").num_params
        return
    with pytest.raises(ConfigError, match="not divisible"):
        load_model(config, "causal-lm")


@pytest.mark.parametrize(
    ("width", "precision", "refused"),
    [
        (100, "bf16", True), (104, "bf16", False), (100, "fp32", False), (102, "fp32", True),
        (100, "bf16-amp", False), (102, "bf16-amp", True),
    ],
)  # fmt: skip
def test_experts_whose_rows_grouped_mm_does_not_take(
    width: int,
    precision: str,
    refused: bool,
) -> None:
    """As torch 2.13 did on a card that is not there, A100 and H100 alike."""
    config = {
        **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
    }  # fmt: skip
    if not refused:
        assert peak(config, precision=precision)
        return
    with pytest.raises(SetupError, match="16 bytes"):
        peak(config, precision=precision)
