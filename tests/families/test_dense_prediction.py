"""UPerNet and ViTMatte: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.api import estimate
from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup


def counts(model_type: str, architecture: str, sizes: Mapping[str, object]) -> tuple[int, int, int]:
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    model = read_model(config, source="config.json", name="x", defaults=class_defaults())
    assert not model.activations_left_out
    found = count_parameters(model)
    return found.total, found.base, found.largest_layer


# Sizes as in the models' configs or as variations of them; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes", "expected"),
    [
        pytest.param(
            "upernet",
            "UperNetForSemanticSegmentation",
            {
                "auxiliary_in_channels": 512,
                "num_labels": 150,
                "backbone_config": {
                    "model_type": "convnext",
                    "hidden_sizes": [128, 256, 512, 1024],
                    "depths": [3, 3, 27, 3],
                    "out_features": ["stage1", "stage2", "stage3", "stage4"],
                },
            },
            (122_102_956, 122_102_956, 14_155_776),
            id="upernet-convnext-base",
        ),
        pytest.param(
            "upernet",
            "UperNetForSemanticSegmentation",
            {"auxiliary_concat_input": True, "auxiliary_num_convs": 2},
            (69_922_884, 69_922_884, 18_874_368),
            id="upernet-resnet",
        ),
        pytest.param(
            "vitmatte",
            "VitMatteForImageMatting",
            {
                "hidden_size": 768,
                "fusion_hidden_sizes": [256, 128, 64, 32],
                "convstream_hidden_sizes": [48, 96, 192],
                "backbone_config": {
                    "model_type": "vitdet",
                    "num_channels": 4,
                    "image_size": 512,
                    "window_size": 14,
                    "use_relative_position_embeddings": True,
                    "window_block_indices": [0, 1, 3, 4, 6, 7, 9, 10],
                    "residual_block_indices": [2, 5, 8, 11],
                    "out_features": ["stage12"],
                },
            },
            (96_686_561, 96_686_561, 2_362_368),
            id="vitmatte-base",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_a_backbone_that_is_not_known_is_refused() -> None:
    config = {"backbone_config": {"model_type": "swin"}}
    with pytest.raises(ConfigError, match=r"backbone_config\.model_type: 'swin' is not supported"):
        counts("upernet", "UperNetForSemanticSegmentation", config)


def test_as_many_fusions_as_convolutions_and_one_more() -> None:
    config = {"fusion_hidden_sizes": [256], "backbone_config": {"model_type": "vitdet"}}
    with pytest.raises(ConfigError, match="fusion_hidden_sizes: must be one more"):
        counts("vitmatte", "VitMatteForImageMatting", config)


def test_sizes_that_are_read_as_they_are_belong_to_the_backbone() -> None:
    """ResNet's levels have no norm of their own; what their stages keep is let go once."""
    setup = TrainingSetup(num_gpus=8, engine="fsdp")
    for phase in estimate(load_model({"model_type": "upernet"}), setup).phases.values():
        assert min(phase.components.values()) >= 0
