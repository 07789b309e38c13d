"""Diffusion transformers: steps of diffusers' own classes, and what is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.errors import ConfigError, SetupError
from memplan.graph.modules import layer_list


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_of_two_streams_are_repeated(
    checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 4}
    model = memplan.load_model(
        {"_class_name": "FluxTransformer2DModel", "num_single_layers": 2, **sizes}
    )
    setup = memplan.TrainingSetup(image_size=512, checkpointing=checkpointing)
    repeated = memplan.estimate(model, setup)
    monkeypatch.setattr(layer_list, "_likeness", lambda tensor: object())  # noqa: ARG005
    apart = memplan.estimate(replace(model, name="apart"), setup)
    assert repeated.peak_bytes == apart.peak_bytes
    assert repeated.reserved_bytes == apart.reserved_bytes
    assert repeated.activations_bytes == apart.activations_bytes


def test_what_was_assumed_is_said() -> None:
    found = memplan.estimate("flux.1-dev", memplan.TrainingSetup(image_size=512))
    assert "prompts of 512 tokens (default)" in found.assumptions
    assert "pictures of 512x512 pixels" in found.assumptions
    assert any("no autoencoder or text encoder" in each for each in found.assumptions)
    clip = memplan.estimate("cogvideox-2b", memplan.TrainingSetup(num_frames=9, seq_len=100))
    assert "clips of 9 frames of 480x720 pixels (default)" in clip.assumptions
    wide = memplan.TrainingSetup(image_size=720, image_width=1280, checkpointing="full")
    oblong = memplan.estimate("wan2.1-t2v-1.3b", wide)
    assert "clips of 81 frames (default) of 720x1280 pixels" in oblong.assumptions


def test_lora_stands_on_the_modules_that_diffusers_names() -> None:
    adapter = memplan.Lora(rank=4, targets=("to_k", "to_q", "to_v", "to_out.0"))
    setup = memplan.TrainingSetup(adapter=adapter, precision="bf16-autocast", checkpointing="full")
    found = memplan.estimate("flux.1-dev", setup)
    width = 3072
    assert found.trainable_params == 4 * 2 * width * (19 * 4 + 38 * 3)


def test_lora_without_targets_is_what_the_scripts_adapt() -> None:
    setup = memplan.TrainingSetup(adapter=memplan.Lora(rank=4), precision="bf16-autocast")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64}
    found = {
        name: memplan.estimate(memplan.load_model({"_class_name": name, **own}), setup)
        for name, own in (
            ("FluxTransformer2DModel", {**sizes, "num_layers": 3, "num_single_layers": 1}),
            ("QwenImageTransformer2DModel", {**sizes, "num_layers": 3}),
        )
    }
    size, rank = 128, 4
    network = 2 * rank * 5 * size
    trained = {name: each.trainable_params for name, each in found.items()}
    pair = 2 * rank * size
    assert trained["FluxTransformer2DModel"] == 3 * (8 * pair + 2 * network) + 3 * pair
    assert trained["QwenImageTransformer2DModel"] == 3 * 4 * pair
    assert any(
        "the script's choice" in each for each in found["FluxTransformer2DModel"].assumptions
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": "UNet2DConditionModel"}, "none of diffusers' classes that are modelled"),
        ({"_class_name": "WanTransformer3DModel", "image_dim": 1280}, "added_kv_proj_dim: must be"),
        ({"_class_name": "WanTransformer3DModel", "pos_embed_seq_len": 514}, "a last frame too"),
        ({"_class_name": "QwenImageTransformer2DModel", "zero_cond_t": True}, "two times a sample"),
        ({"_class_name": "PixArtTransformer2DModel", "cross_attention_dim": 64}, "prompts are"),
        ({"_class_name": "CogVideoXTransformer3DModel", "ofs_embed_dim": 512}, "ofs_embed_dim"),
        ({"_class_name": "FluxTransformer2DModel", "patch_size": 2}, "patch_size: must be 1"),
        ({"_class_name": "SD3Transformer2DModel", "num_attention_heads": 24}, "caption_projection"),
    ],
)
def test_configs_that_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        memplan.load_model(config)


@pytest.mark.parametrize(
    ("model", "field", "value", "words"),
    [
        ("flux.1-dev", "num_frames", 9, "num_frames: no operations are known by which"),
        ("flux.1-dev", "image_size", 1000, "no whole number of tokens of 16 pixels"),
        ("flux.1-dev", "image_width", 512, "say the height too"),
        ("vit-base", "image_width", 512, "makes a picture of anything"),
        ("flux.1-dev", "compile", "layer", "torch.compile of diffusion transformers"),
        ("flux.1-dev", "attention", "eager", "choose sdpa or flash"),
        ("flux.1-dev", "norm", "fused", "leave `kernels` and what overrides them out"),
        ("vit-base", "num_frames", 9, "num_frames"),
    ],
)
def test_setups_that_are_refused(model: str, field: str, value: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        memplan.estimate(model, replace(memplan.TrainingSetup(), **{field: value}))


def test_a_pipelines_folder_is_its_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "my-flux" / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    index = (
        '{"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}'
    )
    (folder.parent / "model_index.json").write_text(index)
    for path in (folder.parent, folder.parent / "model_index.json", folder, folder / "config.json"):
        model = memplan.load_model(path)
        assert (model.name, model.num_params) == ("my-flux", 11_891_178_560)


def test_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave `task` out"):
        memplan.load_model("flux.1-dev", task="causal-lm")
