"""Every kind of adapter on one GPU, and LoRA under every engine, against runs of the real packages."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.sources.adapter_config import adapter_from_mapping
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

RECORDS = json.loads((Path(__file__).parents[1] / "data" / "adapters.json").read_text())
GPU = load_gpu("h100-sxm-80gb")


@pytest.mark.parametrize("record", RECORDS["one_gpu"], ids=lambda record: record["id"])
def test_one_gpu(record: dict[str, Any]) -> None:
    settings, real = record["settings"], record["real"]
    fields = {key: settings[key] for key in ("precision", "attention") if key in settings}
    setup = TrainingSetup(
        adapter=adapter_from_mapping(record["adapter_config"], source=record["id"]).adapter,
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        **fields,
    )
    found = estimate(load_model(record["config"], "causal-lm"), setup, GPU)
    assert found.num_params == real["params"]
    assert found.trainable_params == real["trainable"]
    assert found.held_bytes == pytest.approx(real["requested_before"], rel=0.0005)
    assert found.peak_bytes == pytest.approx(real["requested_peak"], rel=0.0002)


PEAK_BARS = {"fsdp1": 0.015, "deepspeed": 0.003}
"""FSDP1 wraps each adapter's module, which here are gathered together; ZeRO-3 holds a hidden state."""


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    engine = settings["engine"]
    lora = settings["lora"]
    fields: dict[str, Any] = {}
    if engine == "ddp":
        amp = settings["precision"] == "amp"
        fields = {"engine": "ddp", "precision": "bf16-autocast" if amp else "bf16"}
    elif engine == "fsdp2":
        mixed = settings.get("mp", True)
        options = {"reduce_dtype": "fp32", "sync_each_batch": True}
        fields = {
            "engine": "fsdp",
            "precision": "bf16-mixed" if mixed else "bf16",
            "engine_options": options,
        }
    elif engine == "fsdp1":
        fields = {"engine": "fsdp1", "engine_options": {"reduce_dtype": "bf16"}}
    else:
        options = {"zero_init": False}
        fields = {"zero_stage": settings["stage"], "engine_options": options}
    return TrainingSetup(
        num_gpus=8,
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        adapter={
            "lora": {"rank": lora["r"], "targets": "all-linear", "dtype": lora.get("dtype", "fp32")}
        },  # type: ignore[arg-type]
        **fields,
    )


@pytest.mark.parametrize("record", RECORDS["engines"], ids=lambda record: record["id"])
def test_engines(record: dict[str, Any]) -> None:
    settings, real = record["settings"], record["real"]
    found = estimate(load_model(record["config"], "causal-lm"), setup_of(settings), GPU, rank=0)
    # What was recorded is whole blocks.
    assert found.held_bytes == pytest.approx(real["before"], rel=0.005)
    bar = PEAK_BARS.get(settings["engine"], 0.0005)
    assert found.peak_bytes == pytest.approx(real["requested_peak"], rel=bar)
    assert found.reserved_bytes == pytest.approx(real["reserved_peak"], rel=0.045)
