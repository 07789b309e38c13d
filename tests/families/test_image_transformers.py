"""ViT and its kin: counts, and what a config may leave out or contradict."""

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
            "vit",
            "ViTModel",
            {
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "patch_size": 14,
            },
            (632_404_480, 632_404_480, 6_558_720),
            id="vit-huge-patch14",
        ),
        pytest.param(
            "vit",
            "ViTForImageClassification",
            {"num_labels": 1000},
            (86_567_656, 86_389_248, 2_362_368),
            id="vit-base-patch16",
        ),
        pytest.param(
            "vit",
            "ViTForMaskedImageModeling",
            {},
            (86_390_016, 86_389_248, 2_362_368),
            id="vit-masked",
        ),
        pytest.param(
            "vit",
            "ViTModel",
            {"image_size": [224, 448], "qkv_bias": False, "pooler_output_size": 77},
            (85_980_749, 85_980_749, 2_362_368),
            id="vit-oblong",
        ),
        pytest.param(
            "deit",
            "DeiTForImageClassificationWithTeacher",
            {"num_labels": 1000},
            (87_338_192, 86_390_784, 2_362_368),
            id="deit-base-distilled",
        ),
        pytest.param(
            "ijepa",
            "IJepaModel",
            {
                "hidden_size": 1408,
                "intermediate_size": 6144,
                "num_hidden_layers": 40,
                "num_attention_heads": 16,
            },
            (1_011_368_576, 1_011_368_576, 8_656_896),
            id="ijepa-vitg16",
        ),
        pytest.param(
            "dinov2_with_registers",
            "Dinov2WithRegistersForImageClassification",
            {"image_size": 518, "patch_size": 14, "num_labels": 1000},
            (88_120_552, 86_583_552, 2_362_368),
            id="dinov2-registers-base",
        ),
        pytest.param(
            "dinov2_with_registers",
            "Dinov2WithRegistersModel",
            {"use_swiglu_ffn": True, "num_register_tokens": 2},
            (85_831_680, 85_831_680, 1_574_912),
            id="dinov2-swiglu",
        ),
        pytest.param(
            "videomae",
            "VideoMAEForVideoClassification",
            {"num_labels": 400, "use_mean_pooling": True},
            (86_534_800, 86_225_664, 2_362_368),
            id="videomae-base",
        ),
        pytest.param(
            "videomae",
            "VideoMAEForPreTraining",
            {"use_mean_pooling": False},
            (94_210_944, 86_227_200, 2_362_368),
            id="videomae-pretraining",
        ),
        pytest.param(
            "timesformer",
            "TimesformerForVideoClassification",
            {"num_labels": 400},
            (121_566_352, 121_258_752, 2_362_368),
            id="timesformer-base",
        ),
        pytest.param(
            "timesformer",
            "TimesformerModel",
            {"attention_type": "space_only"},
            (85_798_656, 85_798_656, 2_362_368),
            id="timesformer-space",
        ),
        pytest.param(
            "vilt",
            "ViltForImageAndTextRetrieval",
            {"image_size": 384},
            (111_595_777, 111_595_008, 23_440_896),
            id="vilt-retrieval",
        ),
        pytest.param(
            "vilt",
            "ViltForMaskedLM",
            {"image_size": 384, "tie_word_embeddings": False},
            (112_217_658, 111_595_008, 23_471_418),
            id="vilt-always-tied",
        ),
        pytest.param(
            "vilt",
            "ViltForImagesAndTextClassification",
            {"num_images": 2, "modality_type_vocab_size": 3},
            (113_962_754, 111_595_776, 23_440_896),
            id="vilt-two-images",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_a_class_with_a_head_has_no_pooler() -> None:
    bare = counts("vit", "ViTModel", {})
    classes = counts("vit", "ViTForImageClassification", {"num_labels": 2})
    assert bare[0] - classes[0] == (768 + 1) * 768 - 2 * (768 + 1)
    assert classes[1] == bare[0]


def test_i_jepa_has_no_class_token() -> None:
    with_token = counts("vit", "ViTForImageClassification", {"num_labels": 2})[0]
    without = counts("ijepa", "IJepaForImageClassification", {"num_labels": 2})[0]
    assert with_token - without == 2 * 768


def test_attention_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_type: 'sideways' is not known"):
        counts("timesformer", "TimesformerModel", {"attention_type": "sideways"})
