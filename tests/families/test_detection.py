"""LW-DETR, RF-DETR and D-FINE: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
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
            "rf_detr",
            "RfDetrForObjectDetection",
            {
                "num_labels": 91,
                "decoder_n_points": 2,
                "backbone_config": {
                    "model_type": "rf_detr_dinov2",
                    "hidden_size": 384,
                    "num_attention_heads": 6,
                    "image_size": 518,
                    "out_indices": [2, 5, 8, 11],
                },
            },
            (32_174_530, 32_018_531, 998_400),
            id="rf-detr-base",
        ),
        pytest.param(
            "rf_detr",
            "RfDetrForInstanceSegmentation",
            {
                "num_labels": 91,
                "backbone_config": {
                    "model_type": "rf_detr_dinov2",
                    "hidden_size": 384,
                    "num_attention_heads": 6,
                    "image_size": 518,
                    "out_indices": [2, 5, 8, 11],
                },
            },
            (33_112_803, 32_092_547, 998_400),
            id="rf-detr-masks",
        ),
        pytest.param(
            "lw_detr",
            "LwDetrForObjectDetection",
            {
                "num_labels": 91,
                "d_model": 384,
                "decoder_self_attention_heads": 12,
                "decoder_cross_attention_heads": 24,
                "num_feature_levels": 2,
                "projector_scale_factors": [2.0, 0.5],
                "backbone_config": {
                    "model_type": "lw_detr_vit",
                    "hidden_size": 384,
                    "num_hidden_layers": 10,
                    "out_indices": [3, 5, 6, 10],
                },
            },
            (46_823_650, 46_491_395, 1_497_600),
            id="lw-detr-large",
        ),
        pytest.param(
            "lw_detr",
            "LwDetrModel",
            {
                "num_feature_levels": 2,
                "projector_scale_factors": [2.0, 0.5],
                "backbone_config": {
                    "model_type": "lw_detr_vit",
                    "num_hidden_layers": 4,
                    "out_indices": [2, 4],
                },
            },
            (51_934_526, 51_934_526, 5_308_416),
            id="lw-detr-wide-backbone",
        ),
        pytest.param(
            "lw_detr",
            "LwDetrModel",
            {
                "num_feature_levels": 2,
                "projector_scale_factors": [2.0, 0.5],
                "backbone_config": {
                    "model_type": "lw_detr_vit",
                    "hidden_size": 512,
                    "num_attention_heads": 8,
                    "num_hidden_layers": 2,
                    "out_indices": [1, 2],
                },
            },
            (23_508_414, 23_508_414, 2_359_296),
            id="lw-detr-512-channels",
        ),
        pytest.param(
            "lw_detr",
            "LwDetrModel",
            {
                "num_feature_levels": 2,
                "projector_scale_factors": [2.0, 0.5],
                "backbone_config": {
                    "model_type": "lw_detr_vit",
                    "hidden_size": 520,
                    "num_attention_heads": 8,
                    "num_hidden_layers": 2,
                    "out_indices": [1, 2],
                },
            },
            (23_295_746, 23_295_746, 2_433_600),
            id="lw-detr-520-channels",
        ),
        pytest.param(
            "d_fine",
            "DFineForObjectDetection",
            {
                "num_labels": 80,
                "decoder_n_points": [3, 6, 3],
                "backbone_config": {
                    "model_type": "hgnet_v2",
                    "out_features": ["stage2", "stage3", "stage4"],
                },
            },
            (31_244_152, 30_127_744, 3_407_872),
            id="d-fine-large",
        ),
        pytest.param(
            "d_fine",
            "DFineForObjectDetection",
            {
                "eval_idx": 3,
                "d_model": 128,
                "layer_scale": 2,
                "learn_initial_query": True,
                "num_denoising": 0,
                "depth_mult": 0.34,
                "hidden_expansion": 0.5,
                "freeze_backbone_batch_norms": False,
                "backbone_config": {
                    "model_type": "hgnet_v2",
                    "use_learnable_affine_block": True,
                    "out_features": ["stage2", "stage3", "stage4"],
                },
            },
            (22_295_168, 21_762_396, 3_407_872),
            id="d-fine-later-layers",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_frozen_norms_of_the_backbone_are_no_parameters() -> None:
    backbone = {"backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage2"] * 3}}
    frozen = counts("d_fine", "DFineModel", backbone)[0]
    trained = counts("d_fine", "DFineModel", {**backbone, "freeze_backbone_batch_norms": False})[0]
    assert trained > frozen


def test_the_layer_that_is_taken_must_be_there() -> None:
    config = {"eval_idx": 6, "backbone_config": {"model_type": "hgnet_v2"}}
    with pytest.raises(ConfigError, match="eval_idx: must be from -6 to 5, got 6"):
        counts("d_fine", "DFineModel", config)


def test_a_backbone_of_another_type_is_refused() -> None:
    config = {"backbone_config": {"model_type": "resnet"}}
    with pytest.raises(ConfigError, match="'resnet' is not supported here; known are lw_detr_vit"):
        counts("lw_detr", "LwDetrModel", config)
