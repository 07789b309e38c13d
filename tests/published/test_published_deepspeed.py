"""DeepSpeed's estimators against what DeepSpeed printed, digit for digit (``deepspeed.yaml``)."""

from pathlib import Path
from typing import Any

import pytest

from memplan.formulas.deepspeed import (
    DeepSpeedCase,
    DeepSpeedFormula,
    DeepSpeedOffload,
    largest_layer_bytes,
    zero2_table,
    zero3_gpu_bytes,
    zero3_pinned_bytes,
    zero3_table,
)
from memplan.report.lookups.deepspeed import deepspeed_report, deepspeed_text, option_text
from tests.yaml_files import read_yaml

PUBLISHED = read_yaml(Path(__file__).with_name("deepspeed.yaml"))


def published(section: str) -> list[Any]:
    return [pytest.param(entry, id=entry["id"]) for entry in PUBLISHED[section]]


def case_of(entry: dict[str, Any]) -> DeepSpeedCase:
    return DeepSpeedCase(
        total_params=entry["total_params"],
        largest_layer_params=entry["largest_layer_params"],
        num_gpus_per_node=entry["num_gpus_per_node"],
    )


@pytest.mark.parametrize("entry", published("tables"))
def test_table(entry: dict[str, Any]) -> None:
    if entry["zero_stage"] == 2:
        rows = zero2_table(case_of(entry), formula=DeepSpeedFormula(entry["formula"]))
    else:
        rows = zero3_table(case_of(entry))

    printed = [
        [f"{row.per_cpu_bytes / 2**30:.2f}", f"{row.per_gpu_bytes / 2**30:.2f}", option_text(row)]
        for row in rows
    ]
    assert printed == entry["rows"]


@pytest.mark.parametrize("entry", published("tables"))
def test_printed_rows(entry: dict[str, Any]) -> None:
    """The lines that reach the terminal carry the figures in DeepSpeed's columns."""
    report = deepspeed_report(
        total_params=entry["total_params"],
        largest_layer_params=entry["largest_layer_params"],
        num_gpus_total=entry["num_gpus_per_node"],
        num_nodes=1,
        formula=DeepSpeedFormula(entry.get("formula", "documented")),
        additional_buffer_factor=1.5,
    )

    lines = deepspeed_text(report).splitlines()

    for per_cpu, per_gpu, options in entry["rows"]:
        assert f" {per_cpu:>7}GB | {per_gpu:>6}GB | {options}" in lines


@pytest.mark.parametrize("entry", published("megabyte_cases"))
def test_megabyte_case(entry: dict[str, Any]) -> None:
    num_bytes = zero3_gpu_bytes(
        entry["total_params"],
        largest_layer_params=entry["largest_layer_params"],
        num_gpus=entry["num_gpus"],
        offload=DeepSpeedOffload(entry["offload"]),
    )

    assert num_bytes >> 20 == entry["per_gpu_mb"]


def test_largest_layer_memory_of_t5_large() -> None:
    assert largest_layer_bytes(32_899_072) >> 20 == 125


@pytest.mark.parametrize("entry", published("pinned"))
def test_pinned_memory(entry: dict[str, Any]) -> None:
    num_bytes = zero3_pinned_bytes(
        1_000_003,
        offload=DeepSpeedOffload(entry["offload"]),
        gradient_accumulation=entry["gradient_accumulation"],
    )

    assert num_bytes == entry["bytes_per_param"] * 1_000_003


@pytest.mark.parametrize("section", ["tables", "megabyte_cases", "pinned"])
def test_every_entry_says_where(section: str) -> None:
    assert all(entry["where"] for entry in PUBLISHED[section])
