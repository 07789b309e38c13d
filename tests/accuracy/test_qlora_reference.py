"""Adapters over quantized bases, against every record of ``qlora.jsonl`` and ``qlora_cuda.jsonl``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.qlora_records import loaded_bytes, predict_qlora, predict_qlora_cuda

FAKE_FIGURES = ("peak_forward", "peak_backward", "peak_step", "peak")
NUMBERS = json.loads((Path(__file__).parents[1] / "data" / "qlora.json").read_text())


def is_grouped_fp32(settings: dict[str, Any]) -> bool:
    """Grouped queries in fp32, for which CUDA has no fused kernel and fake tensors took one.

    A run on PyTorch's CUDA build is in ``tests/data/qlora.json`` (``fp32-grouped``).
    """
    is_kept = settings["prep"] and not settings["amp"] and not settings["ckpt"]
    return bool(is_kept and settings["model"] != "llama2-7b")


@pytest.mark.reference
def test_fake_tensors(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found, apart = Comparison(), Comparison()
    for record in read_records(reference_dir / "qlora.jsonl"):
        record["model_type"] = record["settings"]["model"]
        comparison = apart if is_grouped_fp32(record["settings"]) else found
        comparison.add(record, record["bytes"], predict_qlora)
    with capsys.disabled():
        sys.stdout.write(f"\nqlora.jsonl: {found.table()}\n")
    assert not found.refused
    assert not apart.refused
    assert apart.num_records == 4
    assert apart.worst("bytes_before")[0] <= 2e-6
    assert found.worst("bytes_before")[0] <= 1e-5
    for name in FAKE_FIGURES:
        worst = {"peak_step": 1e-5}.get(name, 5e-6)
        assert found.worst(name)[0] <= worst, found.worst(name)
    remember(
        "QLoRA",
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
    for record in read_records(reference_dir / "qlora_cuda.jsonl"):
        found.add(record, record["real"], predict_qlora_cuda)
    with capsys.disabled():
        sys.stdout.write(f"\nqlora_cuda.jsonl: {found.table()}\n")
    assert not found.refused
    assert found.worst("trainable")[0] == 0
    assert found.worst("requested_before")[0] <= 0.0005
    assert found.worst("requested_peak")[0] <= 0.0005
    # Of whole blocks, which a request may leave a part of unused.
    assert found.worst("peak_backward")[0] <= 0.005
    # What stands between blocks goes by the order of loading: these records have LLM.int8 in 32 bits
    # until the first step, and quantize before the rest comes to the card. The worst is LLM.int8.
    assert found.quantile("reserved_peak", 0.5) == 0
    assert found.worst("reserved_peak")[0] <= 0.06
    remember(
        "QLoRA, CUDA kernels",
        {
            "held": found.row("requested_before"),
            "peak": found.row("requested_peak"),
            "reserved": found.row("reserved_peak"),
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("requested_peak"),
        found=[found],
    )


@pytest.mark.reference
def test_loading(reference_dir: Path) -> None:
    """The peak while a base is quantized, prepared and adapted; LLM.int8 is packed later there."""
    found = Comparison()
    for record in read_records(reference_dir / "qlora_cuda.jsonl"):
        if record["settings"]["quant"]["type"] != "int8":
            found.add(record, record["real"], loaded_bytes)
    assert not found.refused
    assert found.worst("peak_init")[0] <= 0.015


@pytest.mark.parametrize("record", NUMBERS["records"], ids=lambda record: record["id"])
def test_recorded_figures(record: dict[str, Any]) -> None:
    figures = {**predict_qlora_cuda(record), **loaded_bytes(record)}
    for name, value in record["real"].items():
        assert figures[name] == pytest.approx(value, rel=0.001), name
