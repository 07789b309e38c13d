"""How the GPU catalog is written, for people and for scripts."""

import csv
import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from memplan.hardware.gpu import GpuSpec, gpu_from_memory
from memplan.report.lookups.gpus import (
    gpu_row,
    gpus_csv,
    gpus_json,
    gpus_markdown,
    print_gpu,
    print_gpus,
)
from memplan.sources.cards.catalog import all_gpus, load_gpu
from memplan.units import GIB, MIB


def _printed(print_it: Callable[[Console, Any], None], what: object, *, width: int) -> str:
    console = Console(width=width, file=StringIO(), highlight=False)
    print_it(console, what)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_list_keeps_every_id_and_figure_whole(width: int) -> None:
    text = _printed(print_gpus, all_gpus(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    for gpu in all_gpus():
        row = next(line for line in text.splitlines() if f" {gpu.gpu_id} " in line)
        assert f"{gpu.capacity_bytes / GIB:.2f}" in row
        assert ("~" in row) == bool(gpu.capacity_note)
        assert (" * " in row) == bool(gpu.unverified)
    assert "…" not in text


def test_the_list_is_one_line_per_gpu_where_it_is_wide() -> None:
    lines = _printed(print_gpus, all_gpus(), width=200).splitlines()
    assert "smi MiB" in lines[2]
    rows = lines[4 : 4 + len(all_gpus())]
    assert [row.split()[0] for row in rows] == [gpu.gpu_id for gpu in all_gpus()]


def test_the_list_says_no_where_there_is_no_bf16() -> None:
    text = _printed(print_gpus, [load_gpu("v100"), load_gpu("a100")], width=80)
    v100, a100 = (line.split() for line in text.splitlines()[4:6])
    assert v100 == ["v100-sxm2-32gb", "31.72", "900", "125", "no", "NVLink2", "150"]
    assert a100 == ["a100-sxm4-80gb", "79.15", "2,039", "312", "312", "NVLink3", "300"]


def test_marks_are_explained_only_where_they_stand() -> None:
    plain = _printed(print_gpus, [load_gpu("a100")], width=80)
    marked = _printed(print_gpus, [load_gpu("a30")], width=80)
    assert "derived" not in plain
    assert "unverified" not in plain
    assert "~ derived" in marked
    assert "* some figures are unverified" in marked


def test_one_gpu_in_full() -> None:
    text = " ".join(_printed(print_gpu, load_gpu("h200-nvl"), width=80).split())
    for part in (
        "H200 NVL 141GB (h200-nvl-141gb): 139.81 GiB usable",
        "printed as NVIDIA H200 NVL",
        "139.81 GiB (143,165 MiB)",
        "nvidia-smi 143,771 MiB",
        "4,800 GB/s",
        "bf16 835",
        "NVLink4 bridge: 450 GB/s one way",
        "generation 5, 63 GB/s one way",
        "unverified link, torch_total_mib",
        "notes torch's figure is that of the SXM card",
        "LOG: public logs",
    ):
        assert part in text


def test_a_derived_capacity_says_how() -> None:
    text = " ".join(_printed(print_gpu, load_gpu("a10"), width=200).split())
    assert "22.26 GiB (22,797 MiB): the driver's 23028 MiB less 1 %, torch's is unknown" in text


def test_a_card_known_by_its_memory_has_only_what_is_known() -> None:
    text = _printed(print_gpu, gpu_from_memory(46 * GIB), width=80)
    assert text.splitlines()[0].strip() == "unlisted GPU, 46.00 GiB"
    assert "46.00 GiB (47,104 MiB)" in text
    for label in (
        "printed as",
        "nvidia-smi",
        "nominal memory",
        "bandwidth",
        "link",
        "PCIe",
        "unverified",
    ):
        assert f"\n{label}" not in text


def test_brackets_in_a_name_are_text() -> None:
    gpu = GpuSpec(gpu_id="x", name="[bold]x[/]", memory_nominal_gb=8, has_bf16=True, notes="[/a]")
    text = _printed(print_gpu, gpu, width=80)
    assert "[bold]x[/]" in text
    assert "[/a]" in text


def test_every_row_has_the_same_keys_and_whole_bytes() -> None:
    keys = list(gpu_row(all_gpus()[0]))
    for gpu in (*all_gpus(), gpu_from_memory(8 * GIB)):
        row = gpu_row(gpu)
        assert list(row) == keys
        for key, value in row.items():
            if key.endswith(("_bytes", "_bytes_per_s")):
                assert value is None or type(value) is int


def test_json() -> None:
    document = json.loads(gpus_json([load_gpu("h100")]))
    assert document["schema_version"] == 1
    (row,) = document["rows"]
    assert row["gpu_id"] == "h100-sxm-80gb"
    assert row["capacity_bytes"] == row["torch_total_bytes"] == 81082 * MIB
    assert row["bf16_tflops"] == 989
    assert row["measured_bf16_tflops"] == 794.5
    assert row["compute_capability"] == "9.0"
    assert "h100" in row["aliases"]


def test_csv_has_the_rows_of_json() -> None:
    rows = list(csv.DictReader(StringIO(gpus_csv(all_gpus()))))
    assert [row["gpu_id"] for row in rows] == [gpu.gpu_id for gpu in all_gpus()]
    for row, gpu in zip(rows, all_gpus(), strict=True):
        assert row["capacity_bytes"] == str(gpu.capacity_bytes)
        assert row["device_names"].split("; ") == list(gpu.device_names)
        assert row["has_bf16"] == ("true" if gpu.has_bf16 else "false")
        assert list(row) == list(gpu_row(gpu))


def test_markdown_lists_the_main_columns() -> None:
    header, rule, *rows = gpus_markdown(all_gpus()).splitlines()
    assert header.startswith("| gpu_id | name | capacity_bytes |")
    assert set(rule) == set("|- ")
    assert len(rows) == len(all_gpus())
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1


def test_markdown_of_one_gpu_has_every_field() -> None:
    text = gpus_markdown([load_gpu("h100")])
    assert f"| capacity_bytes | {81082 * MIB} |" in text
    assert len(text.splitlines()) == len(gpu_row(load_gpu("h100"))) + 2


def test_a_bar_does_not_break_a_markdown_table() -> None:
    gpu = GpuSpec(gpu_id="a|b", name="x\ny", memory_nominal_gb=8, has_bf16=True)
    text = gpus_markdown([gpu])
    assert "a\\|b" in text
    assert "| name | x y |" in text


def test_the_command_lists(run: Callable[..., Any]) -> None:
    outcome = run("gpus")
    assert outcome.exit_code == 0
    assert "h100-sxm-80gb" in outcome.stdout


def test_the_command_shows_the_id_that_a_name_stands_for(run: Callable[..., Any]) -> None:
    outcome = run("gpus", "NVIDIA H100 80GB HBM3")
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[0] == "H100 SXM5 80GB (h100-sxm-80gb): 79.18 GiB usable"


@pytest.mark.parametrize("output_format", ["json", "csv", "markdown"])
def test_the_command_writes_for_scripts(run: Callable[..., Any], output_format: str) -> None:
    writers = {"json": gpus_json, "csv": gpus_csv, "markdown": gpus_markdown}
    outcome = run("gpus", "a100", "--format", output_format)
    assert outcome.stdout == writers[output_format]([load_gpu("a100")]) + "\n"


def test_the_command_refuses_in_one_line(run: Callable[..., Any]) -> None:
    outcome = run("gpus", "h1000")
    assert outcome.exit_code == 3
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    assert "Did you mean 'h100'?" in outcome.stderr
