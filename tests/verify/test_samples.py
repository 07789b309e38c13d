"""What verify feeds models that see and hear: transformers' own classes take it, on the CPU, and have a loss."""

from importlib.util import find_spec
from typing import Any

import pytest

from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),  # of other people's code
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None,
        reason="torch and transformers are not installed: make verify",
    ),
]
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 4096,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
TURNING = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SmolVLMForConditionalGeneration": (
        {
            "model_type": "smolvlm", "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGHT, "model_type": "smolvlm_vision"}, "scale_factor": 2,
        },
        {"images_per_sample": 2},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        {
            "model_type": "qwen2_5_vl", "text_config": {**TEXT, "rope_parameters": TURNING},
            "vision_config": {
                "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64,
                "window_size": 56, "fullatt_block_indexes": [1],
            },
            "image_token_id": 7, "vision_start_token_id": 5,
        },
        {"images_per_sample": 2, "image_size": 56},
    ),
    "PaliGemmaForConditionalGeneration": (
        {
            "model_type": "paligemma", "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
            "vision_config": {**SIGHT, "model_type": "siglip_vision_model", "projection_dim": 64},
            "projection_dim": 64, "image_token_index": 7,
        },
        {},
    ),
    "VoxtralForConditionalGeneration": (
        {
            "model_type": "voxtral", "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {
                "model_type": "voxtral_encoder", "hidden_size": 48, "intermediate_size": 192,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_mel_bins": 16,
            },
        },
        {},
    ),
    "Wav2Vec2ForCTC": (
        {
            "model_type": "wav2vec2", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96, "conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 4,
            "layerdrop": 0.1,
        },
        {"target_seq_len": 20, "audio_seconds": 2},
    ),
    "ViTForImageClassification": ({"model_type": "vit", **SIGHT}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_classes_train_on_it(name: str) -> None:
    from memplan.verify.on_torch.building import build, config_of, to_device
    from memplan.verify.on_torch.samples import Sampler, batch_of

    config, values = CASES[name]
    given = {**config, "architectures": [name]}
    model = load_model(given)
    asked = {"micro_batch_size": 2, "precision": "fp32", **values}
    if model.stacks:
        asked["seq_len"] = 512
    setup = TrainingSetup(**asked).resolve(model.context_length, family=model.family)
    made = config_of(given, dropout=None)
    module = build(made, model, setup)
    to_device(module, "cpu", fill=True)
    loss = module(**batch_of(Sampler(config=made, model=model, setup=setup, device="cpu"))).loss
    loss.backward()
    assert sum(each.numel() for each in module.parameters()) == model.num_params
    assert any(each.grad is not None for each in module.parameters())


@pytest.mark.parametrize(("target", "expected"), [(20, 20), (None, 48), (300, 64)])
def test_whisper_is_fed_as_many_labels_as_it_is_asked_for(
    target: int | None, expected: int
) -> None:
    from transformers import WhisperConfig

    from memplan.verify.on_torch.samples import Sampler, batch_of

    sizes = {
        "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "max_target_positions": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 500,
    }  # fmt: skip
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        **sizes,
    }
    model = load_model(config)
    setup = TrainingSetup(seq_len=48, target_seq_len=target).resolve(model.context_length)
    made = WhisperConfig.from_dict(config)
    sampler = Sampler(config=made, model=model, setup=setup, device="cpu")
    assert batch_of(sampler)["labels"].shape == (1, expected)
