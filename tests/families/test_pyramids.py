"""Image transformers in stages: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.api import estimate
from memplan.errors import ConfigError, SetupError
from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.graph.module_names import named_modules
from memplan.sources.about_models.defaults import class_defaults
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup


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
            "swinv2",
            "Swinv2ForImageClassification",
            {
                "embed_dim": 128,
                "depths": [2, 2, 18, 2],
                "num_heads": [4, 8, 16, 32],
                "num_labels": 1000,
            },
            (87_918_816, 86_893_816, 4_198_400),
            id="swinv2-base",
        ),
        pytest.param(
            "swinv2",
            "Swinv2ForMaskedImageModeling",
            {"use_absolute_embeddings": True},
            (30_241_770, 27_879_306, 2_362_368),
            id="swinv2-masked",
        ),
        pytest.param(
            "focalnet",
            "FocalNetForImageClassification",
            {
                "embed_dim": 128,
                "depths": [2, 2, 18, 2],
                "focal_levels": [3, 3, 3, 3],
                "num_labels": 1000,
            },
            (88_749_768, 87_724_768, 4_198_400),
            id="focalnet-base-lrf",
        ),
        pytest.param(
            "focalnet",
            "FocalNetModel",
            {
                "use_conv_embed": True,
                "use_layerscale": True,
                "use_post_layernorm_in_modulation": True,
            },
            (29_620_644, 29_620_644, 2_654_976),
            id="focalnet-convolved",
        ),
        pytest.param(
            "cvt",
            "CvtForImageClassification",
            {"num_labels": 1000},
            (19_997_480, 19_611_712, 663_936),
            id="cvt-13",
        ),
        pytest.param(
            "cvt",
            "CvtModel",
            {"qkv_projection_method": ["avg", "dw_bn", "dw_bn"], "qkv_bias": [True, False, True]},
            (19_608_448, 19_608_448, 663_936),
            id="cvt-averaged",
        ),
        pytest.param(
            "pvt",
            "PvtForImageClassification",
            {},
            (13_229_288, 12_716_288, 1_050_624),
            id="pvt-tiny",
        ),
        pytest.param(
            "glpn",
            "GLPNForDepthEstimation",
            {
                "depths": [3, 8, 27, 3],
                "hidden_sizes": [64, 128, 320, 512],
                "decoder_hidden_size": 64,
            },
            (61_220_903, 60_842_688, 1_475_072),
            id="glpn-kitti",
        ),
        pytest.param("glpn", "GLPNModel", {}, (3_319_392, 3_319_392, 368_896), id="glpn-bare"),
        pytest.param(
            "levit",
            "LevitForImageClassificationWithTeacher",
            {"num_labels": 1000},
            (9_213_936, 8_442_400, 393_216),
            id="levit-128",
        ),
        pytest.param(
            "levit",
            "LevitModel",
            {"mlp_ratio": [2, 0, 2]},
            (7_387_680, 7_387_680, 393_216),
            id="levit-without-a-network",
        ),
        pytest.param(
            "levit",
            "LevitModel",
            {"key_dim": [16, 32, 48]},
            (12_784_160, 12_784_160, 884_736),
            id="levit-keys-of-a-width-for-each-stage",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_focalnet_does_not_read_its_hidden_sizes() -> None:
    plain = counts("focalnet", "FocalNetModel", {})
    assert counts("focalnet", "FocalNetModel", {"hidden_sizes": [1, 2, 3, 4]}) == plain


def test_levit_makes_down_ops_itself_where_there_are_none() -> None:
    operations = [["Subsample", 16, 8, 4, 2, 2], ["Subsample", 16, 16, 4, 2, 2]]
    given = counts("levit", "LevitModel", {"down_ops": operations})
    assert given == counts("levit", "LevitModel", {})


def test_down_ops_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="down_ops: row 0 must be 'Subsample'"):
        counts("levit", "LevitModel", {"down_ops": [["Subsample", 16], ["Subsample", 16]]})


def test_pvt_classifies_a_thousand_classes_by_default() -> None:
    total, base, _ = counts("pvt", "PvtForImageClassification", {})
    assert total - base == 1000 * (512 + 1)


@pytest.mark.parametrize("model_type", ["swinv2", "focalnet"])
def test_which_patches_pretraining_hides_is_not_written_down(model_type: str) -> None:
    for ending, left_out in (("ImageClassification", ""), ("MaskedImageModeling", model_type)):
        config = {"model_type": model_type, "architectures": [f"ModelFor{ending}"]}
        model = read_model(config, source="config.json", name="x", defaults=class_defaults())
        assert model.activations_left_out.endswith(left_out)
        assert bool(model.activations_left_out) is bool(left_out)


def test_cvt_classifies_by_the_last_stages_token() -> None:
    config = {
        "model_type": "cvt",
        "architectures": ["CvtForImageClassification"],
        "cls_token": [False, False, False],
    }
    with pytest.raises(ConfigError, match="cls_token: the last stage has none"):
        read_model(config, source="config.json", name="x", defaults=class_defaults())


def test_sizes_that_make_no_grid_are_refused() -> None:
    """torch raises in the same view: convolutions that pad more give the queries more rows than the stage's grid has."""
    padded = load_model({"model_type": "cvt", "padding_q": [2, 1, 1]})
    with pytest.raises(
        ConfigError,
        match=r"sizes do not go together: in stages\.1\.embed a tensor of 1 x 64 x 3364",
    ):
        estimate(padded, TrainingSetup())


@pytest.mark.parametrize("model_type", ["pvt", "levit"])
def test_classes_with_a_table_for_their_pictures_take_no_others(model_type: str) -> None:
    model = load_model({"model_type": model_type})
    with pytest.raises(SetupError, match="takes pictures of 224 pixels a side alone"):
        estimate(model, TrainingSetup(image_size=256))


@pytest.mark.parametrize("model_type", ["swinv2", "focalnet"])
def test_patches_may_be_higher_than_wide(model_type: str) -> None:
    setup = TrainingSetup(precision="bf16", micro_batch_size=8)
    square, narrow = (
        estimate({"model_type": model_type, "patch_size": patch, "image_size": 64}, setup)
        for patch in ([4, 4], [4, 2])
    )
    assert 1.5 < narrow.activations_bytes / square.activations_bytes < 2.5


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("cvt", "cvt.encoder.stages.1.layers.1.attention.attention.projection_query"),
        ("levit", "levit.encoder.stages.0.layers.8.keys_values.linear"),
        ("pvt", "pvt.encoder.block.3.1.attention.self.query"),
        ("swinv2", "swinv2.encoder.layers.2.blocks.5.attention.self.query"),
        ("focalnet", "focalnet.encoder.stages.1.layers.0.modulation.projection_in"),
        ("glpn", "glpn.encoder.block.0.0.mlp.dense1"),
        ("mobilevit", "mobilevit.encoder.layer.2.transformer.layer.0.attention.attention.query"),
    ],
)
def test_modules_have_the_names_that_the_class_gives_them(model_type: str, name: str) -> None:
    model = load_model({"model_type": model_type})
    tape = record_model(model, TapeOptions())
    assert name in {each.name for each in named_modules(model, tape)}
