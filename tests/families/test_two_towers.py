"""CLIP and its kin: counts, and what a config may leave out or contradict."""

from collections.abc import Mapping

import pytest

from memplan.api import estimate
from memplan.errors import ConfigError
from memplan.estimator.named_run import named_run
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.memory.replaying.ledger import Part
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
            "clip",
            "CLIPModel",
            {},
            (151_277_313, 151_277_313, 25_296_896),
            id="clip-vit-base-patch32",
        ),
        pytest.param(
            "clip",
            "CLIPModel",
            {
                "projection_dim": 768,
                "text_config": {
                    "hidden_size": 768,
                    "intermediate_size": 3072,
                    "num_attention_heads": 12,
                },
                "vision_config": {
                    "hidden_size": 1024,
                    "intermediate_size": 4096,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                    "patch_size": 14,
                },
            },
            (427_616_513, 427_616_513, 37_945_344),
            id="clip-vit-large-patch14",
        ),
        pytest.param(
            "clip",
            "CLIPForImageClassification",
            {"num_labels": 10},
            (87_463_690, 151_277_313, 2_362_368),
            id="clip-classifier",
        ),
        pytest.param(
            "clip",
            "CLIPModel",
            {
                "text_config": {"num_hidden_layers": 2},
                "text_config_dict": {"hidden_size": 256, "num_attention_heads": 4},
            },
            (116_429_825, 116_429_825, 12_648_448),
            id="clip-old-keys",
        ),
        pytest.param(
            "chinese_clip",
            "ChineseCLIPModel",
            {},
            (197_134_081, 197_134_081, 23_440_896),
            id="chinese-clip",
        ),
        pytest.param(
            "altclip",
            "AltCLIPModel",
            {"text_config": {"project_dim": 333, "vocab_size": 1000}},
            (392_507_726, 392_507_726, 4_198_400),
            id="altclip-narrow",
        ),
        pytest.param(
            "siglip",
            "SiglipModel",
            {"vision_config": {"image_size": 256}},
            (203_202_050, 203_202_050, 24_576_000),
            id="siglip-base-patch16-256",
        ),
        pytest.param(
            "siglip",
            "SiglipModel",
            {"vision_config": {"vision_use_head": False}, "text_config": {"projection_size": 100}},
            (195_555_174, 195_555_174, 24_576_000),
            id="siglip-headless",
        ),
        pytest.param(
            "siglip2",
            "Siglip2Model",
            {"text_config": {"vocab_size": 256000}},
            (375_234_050, 375_234_050, 196_608_000),
            id="siglip2-base-naflex",
        ),
        pytest.param(
            "owlv2",
            "Owlv2ForObjectDetection",
            {"vision_config": {"image_size": 960, "patch_size": 16}},
            (154_966_792, 152_203_777, 25_296_896),
            id="owlv2-base-patch16",
        ),
        pytest.param(
            "align", "AlignModel", {}, (172_117_841, 172_117_841, 23_440_896), id="align-base"
        ),
        pytest.param(
            "xclip",
            "XCLIPModel",
            {"vision_config": {"patch_size": 16}},
            (194_929_153, 194_929_153, 25_296_896),
            id="xclip-base-patch16",
        ),
        pytest.param(
            "groupvit", "GroupViTModel", {}, (55_726_609, 55_726_609, 12_648_448), id="groupvit"
        ),
        pytest.param(
            "vision-text-dual-encoder",
            "VisionTextDualEncoderModel",
            {
                "vision_config": {"model_type": "deit", "num_hidden_layers": 2},
                "text_config": {"model_type": "bert", "num_hidden_layers": 2},
            },
            (54_902_017, 54_902_017, 23_440_896),
            id="deit-and-bert",
        ),
        pytest.param(
            "clip_text_model",
            "CLIPTextModelWithProjection",
            {},
            (63_428_096, 63_165_952, 25_296_896),
            id="clip-text",
        ),
        pytest.param(
            "clip_vision_model",
            "CLIPVisionModelWithProjection",
            {
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "patch_size": 14,
                "projection_dim": 1024,
            },
            (632_076_800, 630_766_080, 6_558_720),
            id="clip-vision-huge",
        ),
        pytest.param(
            "siglip_vision_model",
            "SiglipVisionModel",
            {},
            (92_884_224, 92_884_224, 2_362_368),
            id="siglip-vision",
        ),
    ],
)
def test_counts(
    model_type: str, architecture: str, sizes: Mapping[str, object], expected: tuple[int, int, int]
) -> None:
    assert counts(model_type, architecture, sizes) == expected


def test_text_config_dict_replaces_the_whole_text_config() -> None:
    old = {"text_config": {"hidden_size": 768}, "text_config_dict": {"num_hidden_layers": 2}}
    new = {"text_config": {"num_hidden_layers": 2}}
    assert counts("clip", "CLIPModel", old) == counts("clip", "CLIPModel", new)


def test_towers_of_a_type_that_is_not_known_are_refused() -> None:
    config = {"vision_config": {"model_type": "resnet"}, "text_config": {"model_type": "bert"}}
    with pytest.raises(ConfigError, match=r"vision_config\.model_type: 'resnet' is not supported"):
        counts("vision-text-dual-encoder", "VisionTextDualEncoderModel", config)


def test_an_image_smaller_than_a_patch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vision_config\.image_size: is smaller than patch_size"):
        counts("clip", "CLIPModel", {"vision_config": {"image_size": 16}})


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("chinese_clip", "ChineseCLIPModel"), ("owlv2", "Owlv2ForObjectDetection")],
)
def test_what_a_step_lets_go_was_there(model_type: str, architecture: str) -> None:
    """A token cut off in a block of its own, and a projection before the head, are let go once."""
    model = load_model({"model_type": model_type, "architectures": [architecture]})
    setup = TrainingSetup(num_gpus=2, engine="deepspeed", zero_stage=2, checkpointing="full")
    for phase in estimate(model, setup).phases.values():
        assert min(phase.components.values()) >= 0


def _backward_of_step_0(model_type: str, architecture: str) -> list[str]:
    """Operations whose gradients are asked for, in order."""
    config = {"model_type": model_type, "architectures": [architecture]}
    found = estimate(config, gpu=None, seq_len=32, precision="fp32", attention="eager")
    labels = named_run(found).labels
    return [
        f"{label.place}: {label.name}"
        for _, label in sorted(labels.items())
        if label.part is Part.BACKWARD and label.step == 0
    ]


def test_clip_projects_pictures_before_it_reads_texts_and_altclip_behind() -> None:
    """``get_image_features`` comes before ``get_text_features``; backward goes the other way."""
    for model_type, architecture, is_at_once in (
        ("clip", "CLIPModel", True),
        ("chinese_clip", "ChineseCLIPModel", True),
        ("altclip", "AltCLIPModel", False),
    ):
        order = _backward_of_step_0(model_type, architecture)
        projected = next(n for n, each in enumerate(order) if "visual_projection" in each)
        texts = next(n for n, each in enumerate(order) if each.startswith("text_model.encoder"))
        assert (projected > texts) is is_at_once, model_type


def test_clip_cuts_queries_and_values_into_heads_once_all_three_are_there() -> None:
    """Backward copies values' and queries' gradients first; that of keys is a view until their matrix takes it."""
    order = _backward_of_step_0("clip", "CLIPModel")
    last = [each for each in order if each.startswith("text_model.encoder.layers.11:")]
    views = [n for n, each in enumerate(last) if each.endswith("backward of view")]
    matrices = [n for n, each in enumerate(last) if "self_attn.v_proj" in each]
    assert len(views) == 2
    assert views[1] < matrices[0]


@pytest.mark.parametrize("model_type", ["align", "groupvit", "owlv2", "xclip"])
def test_what_has_no_class_for_labels_of_pictures_is_told_which_it_has(model_type: str) -> None:
    with pytest.raises(ConfigError, match=r"those known end in Model(, ForObjectDetection)?$"):
        counts(model_type, "XForImageClassification", {})


def test_aligns_loss_keeps_which_labels_are_left_out_and_how_many_are_not() -> None:
    """Labels are smoothed: of both losses a mask and a number stay until backward."""
    order = _backward_of_step_0("align", "AlignModel")
    assert sum("masked_fill" in each for each in order if each.startswith("head")) == 2
