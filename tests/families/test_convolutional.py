"""Image models of convolutions: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

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
            "resnet",
            "ResNetForImageClassification",
            {"depths": [3, 4, 23, 3], "num_labels": 1000},
            (44_549_160, 42_500_160, 2_359_296),
            id="resnet-101",
        ),
        pytest.param(
            "resnet",
            "ResNetModel",
            {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]},
            (21_284_672, 21_284_672, 2_359_296),
            id="resnet-basic",
        ),
        pytest.param(
            "resnet",
            "ResNetModel",
            {"downsample_in_first_stage": True, "embedding_size": 256},
            (23_598_080, 23_598_080, 2_359_296),
            id="resnet-halved-first",
        ),
        pytest.param(
            "regnet",
            "RegNetForImageClassification",
            {
                "layer_type": "x",
                "depths": [1, 1, 4, 7],
                "hidden_sizes": [24, 56, 152, 368],
                "groups_width": 8,
                "num_labels": 1000,
            },
            (2_684_792, 2_315_792, 369_000),
            id="regnet-x-002",
        ),
        pytest.param(
            "regnet", "RegNetModel", {}, (19_557_656, 19_557_656, 1_183_744), id="regnet-y"
        ),
        pytest.param(
            "bit",
            "BitForImageClassification",
            {"num_labels": 1000},
            (25_549_352, 23_500_352, 2_359_296),
            id="bit-50",
        ),
        pytest.param(
            "bit",
            "BitModel",
            {"layer_type": "bottleneck"},
            (23_508_032, 23_508_032, 2_359_296),
            id="bit-bottleneck",
        ),
        pytest.param(
            "convnext",
            "ConvNextForImageClassification",
            {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "num_labels": 1000},
            (88_591_464, 87_566_464, 4_198_400),
            id="convnext-base",
        ),
        pytest.param(
            "convnext",
            "ConvNextModel",
            {"layer_scale_init_value": 0.0},
            (27_813_504, 27_813_504, 2_362_368),
            id="convnext-unscaled",
        ),
        pytest.param(
            "convnextv2",
            "ConvNextV2ForImageClassification",
            {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2], "num_labels": 1000},
            (3_708_400, 3_387_400, 410_880),
            id="convnextv2-atto",
        ),
        pytest.param(
            "efficientnet",
            "EfficientNetForImageClassification",
            {
                "width_coefficient": 1.0,
                "depth_coefficient": 1.0,
                "hidden_dim": 1280,
                "num_labels": 1000,
            },
            (5_288_548, 4_007_548, 1_281_000),
            id="efficientnet-b0",
        ),
        pytest.param(
            "efficientnet",
            "EfficientNetModel",
            {},
            (63_786_960, 63_786_960, 2_457_600),
            id="efficientnet-b7",
        ),
        pytest.param(
            "poolformer",
            "PoolFormerForImageClassification",
            {"depths": [6, 6, 18, 6], "hidden_sizes": [96, 192, 384, 768], "num_labels": 1000},
            (56_172_520, 55_401_984, 2_654_976),
            id="poolformer-m36",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_fewer_depths_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="depths: has 2 numbers for 4 stages"):
        counts("resnet", "ResNetModel", {"depths": [3, 4]})
