"""A record of PyTorch's own CUDA build as a training setup, with the kernels that users get."""

from typing import Any

from memplan.estimator import Estimate, estimate
from memplan.sources.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.deepspeed_records import flat_options

TASKS = {"causal": "causal-lm", "seq2seq": "seq2seq-lm", "mlm": "masked-lm"}
PRECISIONS = {"bf16": "bf16", "amp": "bf16-amp", "fp32": "fp32"}
GPUS = {"h100": "h100-sxm-80gb", "a100": "a100-sxm4-80gb", "v100": "v100-sxm2-32gb"}
STATELESS = "single"


def engine_of(settings: dict[str, Any]) -> str:
    """The record's engine, as the record calls it; a loop without one is ``single``."""
    name: str = settings.get("engine", STATELESS)
    return name


def setup_of(settings: dict[str, Any]) -> TrainingSetup:
    """The record's settings in memplan's words."""
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        attention=settings.get("attn", "sdpa"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        optimizer=settings.get("opt", "adamw_fused").replace("_", "-"),
        num_gpus=settings.get("world", 1),
        **_engine_fields(settings),
    )


def _engine_fields(settings: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(settings)
    if engine == "fsdp2":
        return {
            "engine": "fsdp",
            "engine_options": {
                "reshard_after_forward": settings["reshard"],
                "reduce_dtype": "fp32" if settings["reduce_fp32"] else "bf16",
            },
        }
    if engine == "deepspeed":
        return {
            "engine": "deepspeed",
            "zero_stage": settings["stage"],
            "precision": f"{settings.get('prec', 'bf16')}-master",
            "gradient_accumulation_steps": settings.get("ga", 1),
            "engine_options": {
                "zero_init": settings.get("zinit", False),
                **flat_options(settings.get("ds", {})),
            },
        }
    return {
        "engine": "ddp",
        "precision": PRECISIONS[settings["precision"]],
        "engine_options": settings.get("ddp", {}),
    }


def answer_to(record: dict[str, Any]) -> Estimate:
    """What memplan says of the record's job on the record's card, rank 0."""
    settings = record["settings"]
    model = load_model(record["config"], TASKS[record.get("task", "causal")])
    return estimate(model, setup_of(settings), load_gpu(GPUS[settings["gpu"]]))


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    answer = answer_to(record)
    return {"params": answer.num_params, "requested_peak": answer.peak_bytes}
