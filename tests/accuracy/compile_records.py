"""Records of torch.compile as training setups, and the figures that memplan gives for them."""

from typing import Any

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import TASKS

PRECISIONS = {"bf16": "bf16", "amp": "bf16-amp", "fp32": "fp32"}


def setup_of(record: dict[str, Any]) -> TrainingSetup:
    """A record of ``compile.jsonl`` in memplan's words."""
    settings = record["settings"]
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=PRECISIONS[settings["precision"]],  # type: ignore[arg-type]
        checkpointing="full" if settings.get("ckpt") else "none",  # type: ignore[arg-type]
        attention="eager" if record["model_type"] == "gemma2" else "sdpa",  # type: ignore[arg-type]
        compile=settings.get("compile", "none"),
    )


def predict_compile(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``compile.jsonl``."""
    model = load_model(record["config"], TASKS[record["task"]])
    found = estimate(model, setup_of(record), load_gpu("h100-sxm-80gb"))
    return {
        "held_by_forward": found.activations_bytes,
        "peak_forward": found.phases["forward"].peak_bytes,
        "peak_backward": found.phases["backward"].peak_bytes,
        "requested_peak": found.peak_bytes,
    }


def truth_of(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures; what forward holds is told apart from what was there before."""
    real = record["real"]
    held: int = real["bytes_after_forward"] - real["bytes_before"]
    return {**real, "held_by_forward": held}
