"""PatchTST and PatchTSMixer: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults


def counts(model_type: str, architecture: str, sizes: Mapping[str, object]) -> tuple[int, int, int]:
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    forecasts = "loss" in sizes and sizes["loss"] == "mse"
    assert bool(model.activations_left_out) is not forecasts
    found = count_parameters(model)
    return found.total, found.base, found.largest_layer


# Sizes as in the models' configs or as variations of them; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes", "expected"),
    [
        pytest.param(
            "patchtst",
            "PatchTSTForPrediction",
            {
                "context_length": 512,
                "patch_length": 12,
                "patch_stride": 12,
                "num_attention_heads": 16,
                "num_input_channels": 7,
                "pooling_type": None,
                "use_cls_token": True,
                "prediction_length": 96,
                "loss": "mse",
            },
            (614_496, 602_112, 66_048),
            id="granite-patchtst",
        ),
        pytest.param(
            "patchtst",
            "PatchTSTForPrediction",
            {
                "context_length": 512,
                "patch_length": 12,
                "patch_stride": 12,
                "num_input_channels": 7,
                "share_projection": False,
                "share_embedding": False,
                "channel_attention": True,
                "loss": "nll",
            },
            (677_624, 612_608, 66_048),
            id="patchtst-apart",
        ),
        pytest.param(
            "patchtst",
            "PatchTSTForRegression",
            {"bias": False, "num_input_channels": 3},
            (597_633, 597_248, 65_536),
            id="patchtst-regression",
        ),
        pytest.param(
            "patchtsmixer",
            "PatchTSMixerForPrediction",
            {
                "context_length": 512,
                "patch_length": 16,
                "patch_stride": 16,
                "d_model": 48,
                "expansion_factor": 3,
                "num_layers": 2,
                "num_input_channels": 7,
                "prediction_length": 96,
                "loss": "mse",
            },
            (196_144, 48_592, 147_552),
            id="granite-patchtsmixer",
        ),
        pytest.param(
            "patchtsmixer",
            "PatchTSMixerForTimeSeriesClassification",
            {"mode": "mix_channel", "self_attn": True, "num_input_channels": 3},
            (3_052, 2_643, 176),
            id="patchtsmixer-channels",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_a_distribution_has_a_layer_for_each_parameter() -> None:
    config = {"num_input_channels": 1, "prediction_length": 24, "loss": "nll"}
    normal = counts(
        "patchtst", "PatchTSTForPrediction", {**config, "distribution_output": "normal"}
    )
    student = counts("patchtst", "PatchTSTForPrediction", config)
    assert student[0] - normal[0] == 24 * (128 + 1)
