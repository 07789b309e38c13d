"""EnCodec, Mimi, CSM and CLVP: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults


def counts(model_type: str, architecture: str, sizes: Mapping[str, object]) -> tuple[int, int, int]:
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    assert model.activations_left_out
    found = count_parameters(model)
    return found.total, found.base, found.largest_layer


# Sizes as in the models' configs or as variations of them; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes", "expected"),
    [
        pytest.param(
            "encodec", "EncodecModel", {}, (14_851_810, 14_851_810, 4_202_496), id="encodec-24khz"
        ),
        pytest.param(
            "encodec",
            "EncodecModel",
            {"norm_type": "time_group_norm", "audio_channels": 2, "use_conv_shortcut": False},
            (14_679_334, 14_679_334, 4_202_496),
            id="encodec-48khz",
        ),
        pytest.param(
            "mimi",
            "MimiModel",
            {"frame_rate": 12.5},
            (79_308_609, 79_308_609, 8_389_632),
            id="mimi",
        ),
        pytest.param(
            "mimi",
            "MimiModel",
            {"frame_rate": 25},
            (78_257_985, 78_257_985, 8_389_632),
            id="mimi-one-rate",
        ),
        pytest.param(
            "csm",
            "CsmForConditionalGeneration",
            {"codec_config": {"model_type": "mimi"}},
            (1_632_100_161, 1_632_100_161, 262_668_288),
            id="csm-1b",
        ),
        pytest.param(
            "csm",
            "CsmForConditionalGeneration",
            {"tie_codebooks_embeddings": False, "codec_config": {"model_type": "mimi"}},
            (1_766_514_497, 1_766_514_497, 262_668_288),
            id="csm-untied",
        ),
        pytest.param(
            "clvp",
            "ClvpModelForConditionalGeneration",
            {"speech_config": {"vocab_size": 8192}},
            (665_110_531, 665_110_531, 8_398_850),
            id="clvp",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_csm_ties_the_tables_of_its_codebooks() -> None:
    codec = {"codec_config": {"model_type": "mimi"}}
    tied = counts("csm", "CsmForConditionalGeneration", codec)[0]
    untied = {**codec, "tie_codebooks_embeddings": False}
    apart = counts("csm", "CsmForConditionalGeneration", untied)[0]
    assert apart - tied == 32 * 2051 * 2048


def test_mimi_resamples_only_between_two_rates() -> None:
    between = counts("mimi", "MimiModel", {"frame_rate": 12.5})[0]
    assert between == counts("mimi", "MimiModel", {})[0]
    assert between - counts("mimi", "MimiModel", {"frame_rate": 25})[0] == 4 * 512 * (512 + 1)
