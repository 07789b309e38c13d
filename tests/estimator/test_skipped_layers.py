"""Layers that a step leaves out by chance."""

from typing import Any

from memplan.api import estimate
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

M2M: dict[str, Any] = {
    "model_type": "m2m_100", "d_model": 64, "encoder_layers": 4, "decoder_layers": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 800, "max_position_embeddings": 128,
}  # fmt: skip


def notes_of(config: dict[str, Any]) -> list[str]:
    setup = TrainingSetup(seq_len=64, precision="bf16")
    answer = estimate(load_model(config, "seq2seq-lm"), setup)
    return [note for note in answer.notes if note.startswith("layerdrop")]


def test_the_classes_own_chance_is_said_with_what_it_may_save() -> None:
    """M2M-100's default is 0.05: 66 % of steps run all eight layers, 999 of 1000 at least five."""
    (note,) = notes_of(M2M)
    assert note.startswith("layerdrop 0.05: a step leaves each of 8 layers out")
    assert "(66% of them)" in note
    assert "leave out at most 3" in note


def test_a_config_that_leaves_none_out_says_nothing() -> None:
    assert not notes_of({**M2M, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0})
    (note,) = notes_of({**M2M, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.5})
    assert note.startswith("layerdrop 0.5: a step leaves each of 4 layers out")


def test_speech_encoders_leave_layers_out_too() -> None:
    config = {
        "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4,
    }  # fmt: skip
    answer = estimate(
        load_model(config), TrainingSetup(precision="bf16", target_seq_len=20, audio_seconds=2)
    )
    assert any(note.startswith("layerdrop 0.1: a step leaves each of 2") for note in answer.notes)
