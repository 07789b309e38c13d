"""Records of ranks that share sequences as training setups, and the figures memplan gives for them.

Drawn with PyTorch 2.13's CUDA build on a card that is not there, as transformers' Trainer and accelerate
run ``context_parallel``, or DeepSpeed's Ulysses: the batch's own tensors are taken off the activations.
"""

from typing import Any

import memplan
from memplan.training.setup import TrainingSetup

GPUS = {"h100": "h100-80gb", "a100": "a100-80gb"}


def precision_of(settings: dict[str, Any]) -> str:
    """DDP's."""
    return {"amp": "bf16-amp", "fp32": "fp32"}.get(settings.get("precision", ""), "bf16")


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """A record's settings."""
    engine = {"ddp": "ddp", "ds": "deepspeed"}.get(settings.get("inner", ""), "fsdp")
    own = {"ddp": precision_of(settings), "deepspeed": "bf16-master"}
    return TrainingSetup(
        num_gpus=settings["world"],
        engine=engine,  # type: ignore[arg-type]
        context_parallel=settings["cp"],
        tensor_parallel=settings.get("tp", 1),
        sequence_parallel=bool(settings.get("sp")),
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        zero_stage=settings.get("stage"),
        precision=own.get(engine, "bf16-mixed"),  # type: ignore[arg-type]
        optimizer=settings.get("opt", "adamw_fused").replace("_", "-"),
        checkpointing="full" if settings.get("ckpt") else "none",  # type: ignore[arg-type]
        engine_options=settings.get("engine_options", {}),
    )


def predict_shared(record: dict[str, Any]) -> dict[str, int]:
    """What is held between steps, kept for backward, and the peak."""
    settings = record["settings"]
    model = memplan.load_model(dict(record["config"]), task="causal-lm")
    found = memplan.estimate(model, setup_of(settings), gpu=GPUS[settings.get("gpu", "h100")])
    return {
        "bytes_before": found.held_bytes,
        "activations": found.activations_bytes,
        "peak": found.peak_bytes,
    }
