"""What two parts of a model read has gradients from both, also where the layers behind it are alike."""

import json
from pathlib import Path

import memplan


def hybrids(checkout: Path) -> list[dict[str, object]]:
    rows = map(json.loads, (checkout / "tests/data/sights.jsonl").read_text().splitlines())
    configs = [row["config"] for row in rows]
    return [each for each in configs if each.get("model_type") == "deepseek_vl_hybrid"]


def test_layers_behind_a_tap_are_played(checkout: Path):
    for config in hybrids(checkout):
        model = memplan.load_model(config)
        for engine in ("ddp", "fsdp", "deepspeed"):
            setup = memplan.TrainingSetup(num_gpus=2, engine=engine)
            estimate = memplan.estimate(model, setup, gpu="h100")
            assert estimate.required_bytes >= estimate.peak_bytes > 0


def test_a_hybrid_without_its_parts_is_of_its_classes_defaults():
    model = memplan.load_model({"model_type": "deepseek_vl_hybrid"})
    estimate = memplan.estimate(model, memplan.TrainingSetup(), gpu="h100")
    assert estimate.required_bytes >= estimate.peak_bytes
    parts = ("text_config", "vision_config", "high_res_vision_config")
    named = [each.partition(":")[0] for each in model.assumptions]
    assert sorted(each for each in named if each in parts) == sorted(parts)
