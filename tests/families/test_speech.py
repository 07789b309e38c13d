"""Speech in or out: counts, and what depends on the class."""

import pytest

from memplan.errors import ConfigError
from memplan.graph.counts import count_parameters
from memplan.model.spec import Task
from tests.families.reading import counted, read, trained

STACKS = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 96,
    "vocab_size": 1000, "max_source_positions": 60, "max_target_positions": 30,
}  # fmt: skip
WHISPER = {"model_type": "whisper", **STACKS, "num_mel_bins": 20}
SPEECH_TO_TEXT = {
    "model_type": "speech_to_text", **STACKS, "conv_channels": 32, "num_conv_layers": 3,
    "conv_kernel_sizes": [3, 5, 3], "input_feat_per_channel": 20,
}  # fmt: skip
MOONSHINE = {
    "model_type": "moonshine", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "decoder_num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip
SPEECHT5 = {
    "model_type": "speecht5", **STACKS, "hidden_size": 64, "conv_dim": [16, 24],
    "conv_kernel": [3, 2], "conv_stride": [2, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "encoder_max_relative_position": 10, "num_mel_bins": 12,
}  # fmt: skip


# Counts from transformers 5.23, on the meta device.
@pytest.mark.parametrize(
    ("config", "total", "base"),
    [
        pytest.param(WHISPER, 291_040, 291_040, id="whisper"),
        pytest.param(SPEECH_TO_TEXT, 280_352, 280_352, id="speech_to_text"),
        pytest.param(MOONSHINE, 395_776, 395_776, id="moonshine"),
        pytest.param(SPEECHT5, 280_552, 205_728, id="speecht5"),
    ],
)
def test_counts(config: dict[str, object], total: int, base: int) -> None:
    counts = count_parameters(read(config))
    assert (counts.total, counts.base, counts.largest_layer) == (total, base, 64_000)
    assert counts.untied == total + 64_000


def test_whispers_sinusoids_are_not_trained() -> None:
    assert trained(WHISPER) == 291_040 - 60 * 64


def test_moonshines_encoder_overrules_the_decoders_heads() -> None:
    """Both stacks write their heads into one config, and the encoder is made first."""
    assert counted({**MOONSHINE, "decoder_num_key_value_heads": 4}) == counted(MOONSHINE)
    assert counted({**MOONSHINE, "encoder_num_key_value_heads": 2})[0] < counted(MOONSHINE)[0]


@pytest.mark.parametrize(
    ("architecture", "total"),
    [("SpeechT5ForTextToSpeech", 1_409_748), ("SpeechT5ForSpeechToSpeech", 1_356_571)],
)
def test_speecht5_speaks(architecture: str, total: int) -> None:
    counts = count_parameters(read({**SPEECHT5, "architectures": [architecture]}))
    assert (counts.total, counts.base) == (total, 205_728)


def test_speecht5_norms_and_masks() -> None:
    """A norm for each convolution, biases, and no masking: no vector for masked frames."""
    changed = {"feat_extract_norm": "layer", "conv_bias": True, "mask_time_prob": 0.0}
    assert counted({**SPEECHT5, **changed})[0] - counted(SPEECHT5)[0] == 2 * 24 + 16 + 24 - 64


def test_published_counts() -> None:
    """Of openai/whisper-large-v3-turbo: 32 layers listen, 4 write."""
    config = {
        "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 4,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "num_mel_bins": 128, "vocab_size": 51_866,
    }  # fmt: skip
    assert counted(config) == (808_878_080, 66_388_480)


def test_base_of_speecht5_has_no_prenet() -> None:
    assert counted(SPEECHT5, Task.BASE)[1] < 64_000


def test_kernel_sizes_for_each_convolution() -> None:
    with pytest.raises(ConfigError, match="conv_kernel_sizes: must have num_conv_layers"):
        read({**SPEECH_TO_TEXT, "num_conv_layers": 2})
