"""wav2vec 2.0 and its kin: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.classes.sounds.parts import MaskedStretches
from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults


def counts(model_type: str, architecture: str, sizes: Mapping[str, object]) -> tuple[int, int, int]:
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    found = count_parameters(model)
    return found.total, found.base, found.largest_layer


# Sizes as in the models' configs or as variations of them; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes", "expected"),
    [
        pytest.param(
            "wavlm",
            "WavLMForAudioFrameClassification",
            {"use_weighted_layer_sum": True},
            (94_383_487, 94_381_936, 4_718_720),
            id="wavlm-base-sd",
        ),
        pytest.param(
            "wavlm",
            "WavLMForXVector",
            {},
            (100_493_132, 94_381_936, 4_718_720),
            id="wavlm-speakers",
        ),
        pytest.param(
            "unispeech-sat",
            "UniSpeechSatForCTC",
            {"mask_time_prob": 0.0},
            (94_396_320, 94_371_712, 4_718_720),
            id="unispeech-sat-base",
        ),
        pytest.param(
            "unispeech",
            "UniSpeechForCTC",
            {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "feat_extract_norm": "layer",
                "vocab_size": 45,
            },
            (315_481_261, 315_435_136, 8_388_736),
            id="unispeech-large",
        ),
        pytest.param(
            "unispeech",
            "UniSpeechModel",
            {"mask_time_prob": 0.0},
            (94_370_944, 94_370_944, 4_718_720),
            id="unispeech-unmasked",
        ),
        pytest.param(
            "data2vec-audio",
            "Data2VecAudioForCTC",
            {},
            (93_188_896, 93_164_288, 2_362_368),
            id="data2vec-audio-base",
        ),
        pytest.param(
            "data2vec-audio",
            "Data2VecAudioForCTC",
            {"add_adapter": True, "output_hidden_size": 512},
            (98_297_120, 98_280_704, 2_362_368),
            id="data2vec-audio-adapted",
        ),
        pytest.param(
            "wav2vec2-conformer",
            "Wav2Vec2ConformerForCTC",
            {
                "vocab_size": 32,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "feat_extract_norm": "layer",
                "conv_bias": True,
                "position_embeddings_type": "relative",
            },
            (618_591_904, 618_559_104, 8_388_736),
            id="conformer-large",
        ),
        pytest.param(
            "wav2vec2-conformer",
            "Wav2Vec2ConformerForPreTraining",
            {"position_embeddings_type": "rotary"},
            (173_306_880, 172_633_984, 4_718_720),
            id="conformer-pretraining",
        ),
        pytest.param(
            "wav2vec2-bert",
            "Wav2Vec2BertForCTC",
            {"add_adapter": True, "vocab_size": 33, "mask_time_prob": 0.0},
            (605_711_201, 605_677_376, 6_293_504),
            id="wav2vec2-bert-adapted",
        ),
        pytest.param(
            "wav2vec2-bert",
            "Wav2Vec2BertForSequenceClassification",
            {"num_labels": 7},
            (581_285_703, 580_493_120, 4_198_400),
            id="wav2vec2-bert-classes",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


@pytest.mark.parametrize("family", ["unispeech", "wavlm", "data2vec-audio"])
def test_a_model_that_masks_nothing_has_no_mask_embedding(family: str) -> None:
    masked = counts(family, "Model", {})[0]
    assert masked - counts(family, "Model", {"mask_time_prob": 0.0})[0] == 768


def test_unispeech_sat_has_its_mask_embedding_anyway() -> None:
    masked = counts("unispeech-sat", "Model", {})
    assert counts("unispeech-sat", "Model", {"mask_time_prob": 0.0}) == masked


def test_only_the_first_wavlm_layer_has_a_table_of_positions() -> None:
    two = counts("wavlm", "Model", {"num_hidden_layers": 2})[0]
    three = counts("wavlm", "Model", {"num_hidden_layers": 3})[0]
    four = counts("wavlm", "Model", {"num_hidden_layers": 4})[0]
    assert four - three == three - two


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="feat_extract_norm: 'batch' is not known"):
        counts("wavlm", "WavLMModel", {"feat_extract_norm": "batch"})


def test_masked_stretches_are_rounded_up_and_find_room() -> None:
    """7.495 stretches of ten frames are eight by chance; no fewer than two, and no more than a clip has room for."""
    stretches = MaskedStretches(0.05, 10, 2, of_view=False)
    assert stretches.in_all(3, 1499) == 3 * 8 * 10
    assert stretches.in_all(1, 100) == 2 * 10
    assert stretches.in_all(1, 19) == 10
