"""MobileViT: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.sources.about_models.defaults import class_defaults


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
            "mobilevit",
            "MobileViTForSemanticSegmentation",
            {"num_labels": 21},
            (6_357_941, 4_937_632, 460_800),
            id="deeplabv3-mobilevit-small",
        ),
        pytest.param(
            "mobilevit",
            "MobileViTForImageClassification",
            {"num_labels": 1000},
            (5_578_632, 4_937_632, 641_000),
            id="mobilevit-small",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_segmentation_leaves_the_last_convolution_out() -> None:
    total, base, _ = counts("mobilevit", "MobileViTModel", {})
    assert total == base
    segmentation = counts("mobilevit", "MobileViTForSemanticSegmentation", {"num_labels": 21})
    assert segmentation[1] == base


def test_other_than_three_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="atrous_rates: expected 3 numbers, got 1"):
        counts("mobilevit", "MobileViTForSemanticSegmentation", {"atrous_rates": [6]})
