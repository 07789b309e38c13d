"""Formats at which transformers' classes raise, seen in their own runs."""

from typing import Any

import pytest

from memplan.api import estimate
from memplan.errors import SetupError
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

CONFIGS: dict[str, dict[str, Any]] = {
    "xlnet": {"d_model": 64, "n_head": 4, "d_inner": 128, "n_layer": 2, "vocab_size": 800},
    "deberta": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 800,
        "intermediate_size": 128, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", CONFIGS)
def test_weights_of_16_bits_are_refused(model_type: str) -> None:
    model = load_model({**CONFIGS[model_type], "model_type": model_type})
    with pytest.raises(SetupError, match="fp32"):
        estimate(model, TrainingSetup(seq_len=64, precision="bf16"))
    assert estimate(model, TrainingSetup(seq_len=64, precision="fp32")).peak_bytes
    cast = TrainingSetup(seq_len=64, num_gpus=2, engine="deepspeed", precision="bf16-master")
    assert estimate(model, cast).peak_bytes


def test_whisper_says_as_much_as_it_is_told_to() -> None:
    config = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "vocab_size": 800, "max_source_positions": 200, "max_target_positions": 448,
    }  # fmt: skip
    model = load_model(config)

    def activations(**lengths: int) -> int:
        return estimate(model, TrainingSetup(precision="bf16", **lengths)).activations_bytes

    assert activations(seq_len=400, target_seq_len=50) == activations(seq_len=50)
    assert activations(seq_len=400) > activations(seq_len=50)
