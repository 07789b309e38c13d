"""SeamlessM4T: which parts each class takes."""

import pytest

from memplan.errors import ConfigError
from memplan.graph.counts import count_parameters
from memplan.model.spec import Task
from tests.families.reading import counted, read

FIRST = {
    "model_type": "seamless_m4t", "hidden_size": 64, "vocab_size": 1000, "t2u_vocab_size": 50,
    "encoder_layers": 2, "decoder_layers": 2, "speech_encoder_layers": 2, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "speech_encoder_intermediate_size": 80, "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 2, "t2u_encoder_ffn_dim": 70, "t2u_decoder_ffn_dim": 72,
    "unit_hifi_gan_vocab_size": 40, "unit_embed_dim": 32, "lang_embed_dim": 8,
    "spkr_embed_dim": 8, "upsample_initial_channel": 64, "num_adapter_layers": 2,
}  # fmt: skip
SECOND = {
    **FIRST, "model_type": "seamless_m4t_v2", "char_vocab_size": 30, "num_adapter_layers": 1,
    "t2u_variance_predictor_embed_dim": 64, "t2u_variance_predictor_hidden_dim": 20,
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "architecture", "total", "untied"),
    [
        (FIRST, "SeamlessM4TModel", 215_168, 192_000),
        (FIRST, "SeamlessM4TForTextToText", 215_168, 192_000),
        (FIRST, "SeamlessM4TForSpeechToText", 608_432, 128_000),
        (FIRST, "SeamlessM4TForTextToSpeech", 562_616, 195_200),
        (FIRST, "SeamlessM4TForSpeechToSpeech", 955_880, 131_200),
        (SECOND, "SeamlessM4Tv2ForTextToText", 215_168, 192_000),
        (SECOND, "SeamlessM4Tv2ForSpeechToText", 441_832, 128_000),
        (SECOND, "SeamlessM4Tv2ForTextToSpeech", 632_423, 195_200),
        (SECOND, "SeamlessM4Tv2ForSpeechToSpeech", 859_087, 131_200),
    ],
)
def test_counts(config: dict[str, object], architecture: str, total: int, untied: int) -> None:
    config = {**config, "architectures": [architecture]}
    assert counted(config)[0] == total
    assert counted({**config, "tie_word_embeddings": False})[0] == total + untied


@pytest.mark.parametrize(("config", "base"), [(FIRST, 1_014_696), (SECOND, 917_903)])
def test_the_base_model_has_every_part(config: dict[str, object], base: int) -> None:
    assert count_parameters(read(config)).base == base
    assert counted(config, Task.BASE) == (base, 65_664)


def test_dilations_for_each_kernel() -> None:
    with pytest.raises(ConfigError, match="resblock_dilation_sizes: needs one list"):
        read({**FIRST, "resblock_dilation_sizes": [[1, 3, 5]]})
