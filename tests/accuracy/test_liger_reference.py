"""Liger's kernels, one by one and together, against every record of ``liger.jsonl``.

The records come from PyTorch's own CUDA build with liger-kernel 0.8.5; some are their eager twins.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.sources.training_arguments import setup_from_arguments
from memplan.training.setup import TrainingSetup
from tests.accuracy.allocator_records import GPUS, PRECISIONS, TASKS
from tests.accuracy.comparison import Comparison, read_records, remember

BARS = {
    "bytes_before": 0.002,
    "activations": 0.001,
    "peak_forward": 0.002,
    "peak_backward": 0.002,
    "requested_peak": 0.0001,
    "reserved_peak": 0.008,
}
"""Worst relative error of each figure; the issue asks for 0.5 % of the peaks. Phases count whole blocks in
the records, and a block's unsplit rest is not memplan's: up to 20 MiB behind the optimizer's states."""
EAGER_ONLY = frozenset({"gemma2"})
"""Models of which the records run the attention written out."""


def setup_of(record: dict[str, Any]) -> TrainingSetup:
    """The record's settings, Liger's as training arguments spell them."""
    settings = record["settings"]
    arguments: dict[str, object] = {"per_device_train_batch_size": settings["b"]}
    if settings.get("liger") is not None:
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": settings["liger"]}
    kernels = setup_from_arguments(arguments, source=record["id"])
    attention = settings.get("attn", "eager" if record["model_type"] in EAGER_ONLY else "sdpa")
    beside = {name: settings[name] for name in ("loss", "packing") if name in settings}
    if settings.get("rope") == "torchtitan":
        beside["rotary"] = "complex"
    return TrainingSetup(
        engine="ddp",  # type: ignore[arg-type]
        precision=PRECISIONS[settings["precision"]],  # type: ignore[arg-type]
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        attention=attention,
        checkpointing="full" if settings.get("ckpt") else "none",  # type: ignore[arg-type]
        kernels=kernels.kernels,
        norm=kernels.norm,
        mlp=kernels.mlp,
        **{"rotary": kernels.rotary, "loss": kernels.loss, **beside},
    )


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    gpu = load_gpu(GPUS[record["settings"].get("gpu", "h100")])
    answer = estimate(load_model(record["config"], TASKS[record["task"]]), setup_of(record), gpu)
    return {
        "bytes_before": answer.held_bytes,
        "activations": answer.activations_bytes,
        "peak_forward": answer.phases["forward"].peak_bytes,
        "peak_backward": answer.phases["backward"].peak_bytes,
        "requested_peak": answer.peak_bytes,
        "reserved_peak": answer.reserved_bytes,
    }


def compare(records: list[dict[str, Any]]) -> Comparison:
    comparison = Comparison()
    for record in records:
        real = record["real"]
        held = real["bytes_after_forward"] - real["bytes_before"]
        comparison.add(record, {**real, "activations": held}, predict)
    return comparison


OTHER_BARS = {
    "bytes_before": 0.0005,
    "activations": 0.0005,
    "peak_forward": 0.0035,
    "peak_backward": 0.0002,
    "requested_peak": 0.003,
}
"""Of other code bases' losses, of packing and torchtitan's rotary embeddings: torchtitan's and torchtune's
pieces are as high as that of the middle ones, to a hidden state or two."""


def check(comparison: Comparison, bars: dict[str, float]) -> None:
    assert not comparison.refused
    for name, bar in bars.items():
        assert comparison.worst(name)[0] <= bar, (name, comparison.worst(name))


@pytest.mark.reference
def test_liger(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(list(read_records(reference_dir / "liger.jsonl")))
    with capsys.disabled():
        sys.stdout.write(f"\nliger.jsonl: {comparison.table()}\n")
    check(comparison, BARS)
    names = ("bytes_before", "activations", "requested_peak", "reserved_peak")
    remember(
        "Liger's kernels",
        {name: comparison.row(name) for name in names},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("requested_peak"),
        found=[comparison],
    )


def records_of(checkout: Path, name: str) -> list[dict[str, Any]]:
    """Runs of the same oracle, for users without the reference folder."""
    data = json.loads((checkout / "tests" / "data" / "liger.json").read_text())
    return [
        {
            **run,
            "config": data["models"][run["model"]],
            "model_type": data["models"][run["model"]]["model_type"],
            "task": "causal",
            "real": run["figures"],
        }
        for run in data[name]
    ]


def test_representative_records(checkout: Path) -> None:
    records = records_of(checkout, "runs")
    assert len(records) >= 20
    check(compare(records), BARS)


def test_other_kernels(checkout: Path) -> None:
    """Losses in place, in pieces and cut; several sequences in one row; heads turned in complex numbers."""
    records = records_of(checkout, "other_kernels")
    assert len(records) >= 15
    check(compare(records), OTHER_BARS)
