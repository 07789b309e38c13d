"""Records of jobs as training setups, and the figures that memplan gives for them."""

from typing import Any

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import TASKS


def is_compiled(record: dict[str, Any]) -> bool:
    """Whether torch.compile has a part in it, which tries kernels out before the first step."""
    return "compile" in record["settings"]


def setup_of(record: dict[str, Any]) -> TrainingSetup:
    """A record of ``jobs.jsonl`` in memplan's words."""
    settings = record["settings"]
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision={"bf16": "bf16", "amp": "bf16-amp"}[settings["precision"]],  # type: ignore[arg-type]
        checkpointing="full" if settings.get("ckpt") else "none",  # type: ignore[arg-type]
        gradient_accumulation_steps=settings.get("accumulate", 1),
        job=settings.get("job", "sft"),
        compile=settings.get("compile", "none"),
        fp8=f"torchao-{settings['float8']}" if "float8" in settings else "none",  # type: ignore[arg-type]
        ema="weights" if settings.get("ema") else None,  # type: ignore[arg-type]
    )


def truth_of(record: dict[str, Any]) -> dict[str, int]:
    """The figures that are compared."""
    real = record["real"]
    return {
        "requested_before": real["requested_before"],
        "requested_peak": real["requested_peak"],
        "peak_forward": real["peak_forward"],
        "peak_backward": real["peak_backward"],
        "reserved_peak": real["reserved_peak"],
    }


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``jobs.jsonl``, with all that kernels allocate."""
    model = load_model(record["config"], TASKS[record["task"]])
    found = estimate(model, setup_of(record), load_gpu("h100-sxm-80gb"))
    phases = found.phases
    return {
        "requested_before": found.held_bytes,
        "requested_peak": found.peak_bytes,
        "peak_forward": phases["forward"].peak_bytes,
        "peak_backward": phases["backward"].peak_bytes,
        "reserved_peak": found.reserved_bytes,
    }
