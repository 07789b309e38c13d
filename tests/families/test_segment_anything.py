"""SAM, SAM-HQ, SAM 2 and PP-FormulaNet: counts, and what a config may leave out or contradict."""

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
    assert bool(model.activations_left_out) is (model_type == "sam2_video")
    found = count_parameters(model)
    return found.total, found.base, found.largest_layer


# Sizes as in the models' configs or as variations of them; counts from transformers 5.23.
@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes", "expected"),
    [
        pytest.param("sam", "SamModel", {}, (93_735_728, 93_735_728, 3_145_728), id="sam-vit-base"),
        pytest.param(
            "sam",
            "SamModel",
            {
                "vision_config": {"use_rel_pos": False, "use_abs_pos": False},
                "mask_decoder_config": {"iou_head_depth": 4},
            },
            (90_563_120, 90_563_120, 2_362_368),
            id="sam-without-positions",
        ),
        pytest.param(
            "sam_hq", "SamHQModel", {}, (94_806_832, 94_806_832, 3_145_728), id="sam-hq-vit-base"
        ),
        pytest.param(
            "sam2_video", "Sam2VideoModel", {}, (38_962_498, 38_962_498, 2_362_368), id="sam2-tiny"
        ),
        pytest.param(
            "sam2_video",
            "Sam2VideoModel",
            {
                "enable_occlusion_spatial_embedding": False,
                "enable_temporal_pos_encoding_for_object_pointers": False,
                "vision_config": {
                    "model_type": "sam2_vision_model",
                    "backbone_channel_list": [1152, 576, 288, 144],
                    "backbone_config": {
                        "model_type": "sam2_hiera_det_model",
                        "hidden_size": 144,
                        "num_attention_heads": 2,
                        "blocks_per_stage": [2, 6, 36, 4],
                        "embed_dim_per_stage": [144, 288, 576, 1152],
                        "num_attention_heads_per_stage": [2, 4, 8, 16],
                        "window_size_per_stage": [8, 4, 16, 8],
                        "global_attention_blocks": [23, 33, 43],
                    },
                },
            },
            (224_430_130, 224_430_130, 5_313_024),
            id="sam2-hiera-large",
        ),
        pytest.param(
            "pp_formulanet",
            "PPFormulaNetForConditionalGeneration",
            {
                "vision_config": {"image_size": 768},
                "text_config": {"max_position_embeddings": 1024},
            },
            (181_110_528, 155_510_528, 25_600_000),
            id="pp-formulanet-l",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_pp_formulanet_ties_nothing() -> None:
    tied = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True}
    name = "PPFormulaNetForConditionalGeneration"
    assert counts("pp_formulanet", name, tied) == counts("pp_formulanet", name, {})


def test_sam_takes_the_width_of_its_network_from_a_ratio() -> None:
    ratio = counts("sam", "SamModel", {"vision_config": {"mlp_ratio": 2.0}})
    assert ratio == counts("sam", "SamModel", {"vision_config": {"mlp_dim": 1536}})


# ``SamTwoWayAttentionBlock`` is handed no rate: only the last attention takes the config's.
@pytest.mark.parametrize(
    ("model_type", "architecture", "total"),
    [("sam", "SamModel", 93_670_000), ("sam_hq", "SamHQModel", 94_741_104)],
)
def test_two_way_layers_have_a_rate_of_their_own(
    model_type: str, architecture: str, total: int
) -> None:
    sizes = {"mask_decoder_config": {"attention_downsample_rate": 4}}
    assert counts(model_type, architecture, sizes)[0] == total


def test_sam_says_which_step_is_meant() -> None:
    setup = TrainingSetup(precision="bf16", checkpointing="full")
    answer = estimate(load_model("sam-vit-base"), setup)
    assert any("one point or box a picture" in each for each in answer.assumptions)


def test_a_mask_decoder_that_is_given_no_layers_picture_is_refused() -> None:
    """``SamHQVisionEncoder`` collects what layers over whole pictures give; its decoder reads the first."""
    config = {"model_type": "sam_hq", "vision_config": {"num_hidden_layers": 1}}
    with pytest.raises(ConfigError, match=r"global_attn_indexes: must name one of the 1 layers"):
        load_model(config)
