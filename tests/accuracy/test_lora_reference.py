"""LoRA and DoRA on one GPU, against every record of ``lora.jsonl`` and ``lora_cuda.jsonl``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.lora_records import predict_lora, predict_lora_cuda

FAKE_FIGURES = ("peak_forward", "peak_backward", "peak_step", "peak")
WORST = {"peak_step": 6e-6}
"""Of figures that do not come as near as the others: no more than five times what is reached."""
NUMBERS = json.loads((Path(__file__).parents[1] / "data" / "lora.json").read_text())


def is_grouped_fp32(settings: dict[str, Any]) -> bool:
    """Grouped queries in fp32, which fake tensors give to flash attention and CUDA to no fused kernel.

    Fake tensors cannot be asked what a card dispatches to; memplan follows the card.
    """
    return settings["base"] == "fp32" and not settings["amp"] and "qwen2-7b" in settings["model"]


@pytest.mark.reference
def test_fake_tensors(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found, apart = Comparison(), Comparison()
    for record in read_records(reference_dir / "lora.jsonl"):
        record["model_type"] = record["settings"]["model"]
        comparison = apart if is_grouped_fp32(record["settings"]) else found
        comparison.add(record, record["bytes"], predict_lora)
    with capsys.disabled():
        sys.stdout.write(f"\nlora.jsonl: {found.table()}\n")
    assert not found.refused
    assert not apart.refused
    assert apart.num_records == 1
    assert found.worst("bytes_before")[0] <= 6e-6
    for name in FAKE_FIGURES:
        assert found.worst(name)[0] <= WORST.get(name, 1e-6), found.worst(name)
    remember(
        "LoRA",
        {
            "held, fake tensors": found.row("bytes_before", num_apart=apart.num_records),
            "peak, fake tensors": found.row("peak", num_apart=apart.num_records),
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("peak"),
        found=[found],
    )


@pytest.mark.reference
@pytest.mark.usefixtures("labels_are_ids")
def test_cuda_kernels(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison()
    for record in read_records(reference_dir / "lora_cuda.jsonl"):
        found.add(record, record["real"], predict_lora_cuda)
    with capsys.disabled():
        sys.stdout.write(f"\nlora_cuda.jsonl: {found.table()}\n")
    assert not found.refused
    assert found.worst("params")[0] == found.worst("trainable")[0] == 0
    assert found.worst("requested_before")[0] <= 0.0003
    assert found.worst("requested_peak")[0] <= 0.00006
    # Of whole blocks, which a request may leave a part of unused.
    assert found.worst("peak_forward")[0] <= 0.01
    assert found.worst("peak_backward")[0] <= 0.01
    assert found.quantile("reserved_peak", 0.95) <= 0.001
    assert found.worst("reserved_peak")[0] <= 0.004
    remember(
        "LoRA, CUDA kernels",
        {
            "held": found.row("requested_before"),
            "peak": found.row("requested_peak"),
            "reserved": found.row("reserved_peak"),
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("requested_peak"),
        found=[found],
    )


@pytest.mark.parametrize("record", NUMBERS["records"], ids=lambda record: record["id"])
def test_recorded_figures(record: dict[str, Any]) -> None:
    figures = predict_lora_cuda(record)
    for name, value in record["real"].items():
        assert figures[name] == pytest.approx(value, rel=0.0005), name
