"""The GPU catalog as people and scripts read it: a table, one card in full, JSON, CSV, Markdown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import fields
from memplan.hardware.gpu import GpuSpec, LinkSpec, TflopsByDtype
from memplan.report.rows.written import csv_cell, json_text
from memplan.report.terminal.narrow import print_table
from memplan.text import in_markdown
from memplan.units import GB, GIB, MIB, format_gib, is_size

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.report.terminal.console import Console

GPUS_SCHEMA_VERSION = 1
"""Raised when a key of ``gpu_row`` changes its name or its meaning."""

WIDE_TABLE_COLUMNS = 190
"""From this width on the list has every column."""

_MARKDOWN_KEYS = (
    "gpu_id", "name", "capacity_bytes", "driver_total_bytes", "bandwidth_bytes_per_s",
    "fp16_tflops", "bf16_tflops", "link", "link_bytes_per_s",
)  # fmt: skip
_UNKNOWN = "-"

_Value = str | int | float | bool | tuple[str, ...] | None


def gpu_row(gpu: GpuSpec) -> dict[str, _Value]:
    """Return everything about one GPU under flat names: bytes are integers, None is unknown."""
    capability = gpu.compute_capability
    return {
        "gpu_id": gpu.gpu_id,
        "name": gpu.name,
        "vendor": gpu.vendor.value,
        "allocator": gpu.manager.value,
        "architecture": gpu.architecture,
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "form_factor": gpu.form_factor,
        "year": gpu.year,
        "num_multiprocessors": gpu.num_multiprocessors,
        "capacity_bytes": gpu.capacity_bytes,
        "capacity_note": gpu.capacity_note,
        "memory_nominal_gb": gpu.memory_nominal_gb,
        "memory_type": gpu.memory_type,
        "driver_total_bytes": gpu.driver_total_bytes,
        "torch_total_bytes": gpu.torch_total_bytes,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        **{f"{dtype}_tflops": rate for dtype, rate in _rates(gpu.dense_tflops)},
        **{f"measured_{dtype}_tflops": rate for dtype, rate in _rates(gpu.measured_tflops)},
        **_link_columns(gpu.link),
        "pcie_generation": gpu.pcie.generation if gpu.pcie else None,
        "pcie_bytes_per_s": gpu.pcie.bytes_per_s if gpu.pcie else None,
        "node": gpu.node.name if gpu.node else None,
        "node_memory_bytes": gpu.node.memory_bytes if gpu.node else None,
        "node_num_gpus": gpu.node.num_gpus if gpu.node else None,
        "has_bf16": gpu.has_bf16,
        "supports_flash_attention": gpu.supports_flash_attention,
        "aliases": gpu.aliases,
        "device_names": gpu.device_names,
        "unverified": gpu.unverified,
        "notes": gpu.notes,
        "sources": gpu.sources,
    }


def gpus_json(gpus: Sequence[GpuSpec]) -> str:
    """Return ``{"schema_version", "rows"}``, one row per GPU (see ``gpu_row``)."""
    document = {"schema_version": GPUS_SCHEMA_VERSION, "rows": [gpu_row(gpu) for gpu in gpus]}
    return json_text(document, indent=2)


def gpus_csv(gpus: Sequence[GpuSpec]) -> str:
    """Return the same rows as CSV under one line of names; items of a list are parted by ``;``."""
    import csv
    from io import StringIO

    text = StringIO()
    rows = [gpu_row(gpu) for gpu in gpus]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else ())
    writer.writerows([csv_cell(_cell(value)) for value in row.values()] for row in rows)
    return text.getvalue().rstrip("\n")


def gpus_markdown(gpus: Sequence[GpuSpec]) -> str:
    """Return a Markdown table: the main columns of a list, or every field of a single GPU."""
    rows = [gpu_row(gpu) for gpu in gpus]
    if len(rows) == 1:
        return _markdown(("field", "value"), list(rows[0].items()))
    return _markdown(_MARKDOWN_KEYS, [[row[key] for key in _MARKDOWN_KEYS] for row in rows])


def print_gpus(console: "Console", gpus: Sequence[GpuSpec], *, of: str = "") -> None:
    """Print the list, with more columns where the console is wide enough for them.

    ``of``: what picked them.
    """
    from rich.text import Text

    picked = f" with {of} or more" if is_size(of) else f" that {of!r} is said of" if of else ""
    console.print(f"{len(gpus)} cards{picked}; `memplan gpus NAME` shows one with its sources")
    wide = console.width >= WIDE_TABLE_COLUMNS
    print_table(console, _wide_table(gpus) if wide else _narrow_table(gpus))
    for line in _legend(gpus):
        console.print(Text(line, style="dim"))


def print_gpu(console: "Console", gpu: GpuSpec) -> None:
    """Print one GPU in full: figures, names, what is unverified, notes and sources."""
    from rich.table import Table
    from rich.text import Text

    listed = f" ({gpu.gpu_id}): {_usable(gpu)} GiB usable" if gpu.is_listed else ""
    console.print(Text.assemble((gpu.name, "bold"), listed))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _detail_lines(gpu):
        table.add_row(label, Text(text))
    console.print(table)


def _narrow_table(gpus: Sequence[GpuSpec]) -> "Table":
    table = _table("GPU", "GiB", "GB/s", "fp16", "bf16", "link GB/s")
    for gpu in gpus:
        table.add_row(
            _marked_id(gpu),
            _usable(gpu),
            _per_second(gpu.bandwidth_bytes_per_s),
            _number(gpu.dense_tflops.fp16),
            _bf16(gpu),
            _short_link(gpu.link),
        )
    return table


def _wide_table(gpus: Sequence[GpuSpec]) -> "Table":
    table = _table(
        "GPU", "GiB", "GB/s", "fp16", "bf16", "link GB/s",
        "name", "also", "GB", "smi MiB", "fp32", "tf32", "fp8", "CUDA", "PCIe", "year",
        texts=("GPU", "link GB/s", "name", "also"),
    )  # fmt: skip
    for gpu in gpus:
        driver_total = gpu.driver_total_bytes
        table.add_row(
            _marked_id(gpu),
            _usable(gpu),
            _per_second(gpu.bandwidth_bytes_per_s),
            _number(gpu.dense_tflops.fp16),
            _bf16(gpu),
            _short_link(gpu.link),
            gpu.name,
            gpu.aliases[0] if gpu.aliases else "",
            _number(gpu.memory_nominal_gb),
            _number(None if driver_total is None else driver_total // MIB),
            _number(gpu.dense_tflops.fp32),
            _number(gpu.dense_tflops.tf32),
            _number(gpu.dense_tflops.fp8),
            _capability(gpu) or _UNKNOWN,
            _number(gpu.pcie.generation if gpu.pcie else None),
            str(gpu.year or _UNKNOWN),
        )
    return table


def _table(*headers: str, texts: Sequence[str] = ("GPU", "link GB/s")) -> "Table":
    """Return an empty table: texts to the left, numbers to the right; ids and numbers stay whole."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        is_text = header in texts
        table.add_column(
            header,
            justify="left" if is_text else "right",
            no_wrap=header == "GPU" or not is_text,
            overflow="fold",
            style="bold" if header == "GPU" else None,
        )
    return table


def _legend(gpus: Sequence[GpuSpec]) -> list[str]:
    lines = ["GiB: what torch reports as usable; fp16, bf16: dense TFLOP/s; link: one way."]
    if any(gpu.capacity_note for gpu in gpus):
        lines.append("~ derived, as torch's total is not known.")
    if any(gpu.unverified for gpu in gpus):
        lines.append("* some figures are unverified: `memplan gpus NAME` says which.")
    return lines


def _detail_lines(gpu: GpuSpec) -> list[tuple[str, str]]:
    """Return label and text of every line that has something to say."""
    listed = gpu.is_listed
    lines = [
        ("also called", ", ".join(gpu.aliases)),
        ("printed as", ", ".join(gpu.device_names)),
        ("kind", ", ".join(filter(None, _kind(gpu)))),
        ("usable memory", _capacity_line(gpu)),
        ("nvidia-smi", _mebibytes(gpu.driver_total_bytes)),
        ("nominal memory", f"{gpu.memory_nominal_gb:g} GB {gpu.memory_type}" if listed else ""),
        ("bandwidth", _rate(gpu.bandwidth_bytes_per_s)),
        ("dense TFLOP/s", _rates_line(gpu.dense_tflops)),
        ("measured TFLOP/s", _rates_line(gpu.measured_tflops)),
        ("link", _link_line(gpu.link) if listed or gpu.link else ""),
        ("PCIe", _pcie_line(gpu)),
        ("usual node", _node_line(gpu)),
        ("bf16", "yes" if gpu.has_bf16 else "no, torch emulates it: train in fp16"),
        ("flash attention", "yes" if gpu.supports_flash_attention else "no"),
        ("unverified", ", ".join(gpu.unverified) or ("nothing" if listed else "")),
        ("notes", gpu.notes),
        ("sources", "\n".join(gpu.sources)),
    ]
    return [(label, text) for label, text in lines if text]


def _kind(gpu: GpuSpec) -> tuple[str, ...]:
    capability = _capability(gpu)
    return (
        f"{gpu.vendor.value} {gpu.architecture}".rstrip(),
        f"compute capability {capability}" if capability else "",
        gpu.form_factor,
        str(gpu.year or ""),
    )


def _capacity_line(gpu: GpuSpec) -> str:
    figure = f"{format_gib(gpu.capacity_bytes)} ({gpu.capacity_bytes // MIB:,} MiB)"
    return f"{figure}: {gpu.capacity_note}" if gpu.capacity_note else figure


def _rates_line(rates: TflopsByDtype) -> str:
    return ", ".join(f"{dtype} {rate:,g}" for dtype, rate in _rates(rates) if rate is not None)


def _link_line(link: LinkSpec | None) -> str:
    if link is None:
        return "none but PCIe"
    parts = [f"{link.kind}: {_rate(link.bytes_per_s)} one way"]
    if link.pair_bytes_per_s is not None:
        parts.append(f"{_rate(link.pair_bytes_per_s)} between two GPUs")
    if link.topology:
        parts.append(link.topology)
    return ", ".join(parts)


def _node_line(gpu: GpuSpec) -> str:
    """What offloading is judged by where nobody says how much CPU RAM there is."""
    if gpu.node is None:
        return ""
    own = f"{gpu.node.num_gpus} of them" if gpu.node.num_gpus > 1 else "each"
    memory = format_gib(gpu.node.memory_bytes, digits=0)
    return f"{gpu.node.name}: {memory} of CPU RAM with {own} ({gpu.node.source})"


def _pcie_line(gpu: GpuSpec) -> str:
    if gpu.pcie is None:
        return ""
    return f"generation {gpu.pcie.generation}, {_rate(gpu.pcie.bytes_per_s)} one way"


def _link_columns(link: LinkSpec | None) -> dict[str, _Value]:
    return {
        "link": link.kind if link else None,
        "link_bytes_per_s": link.bytes_per_s if link else None,
        "link_pair_bytes_per_s": link.pair_bytes_per_s if link else None,
        "link_topology": link.topology if link else None,
    }


def _rates(rates: TflopsByDtype) -> list[tuple[str, float | None]]:
    return [(field.name, getattr(rates, field.name)) for field in fields(rates)]


def _capability(gpu: GpuSpec) -> str:
    return ".".join(str(part) for part in gpu.compute_capability or ())


def _marked_id(gpu: GpuSpec) -> str:
    return f"{gpu.gpu_id} *" if gpu.unverified else gpu.gpu_id


def _usable(gpu: GpuSpec) -> str:
    return f"{'~' if gpu.is_capacity_derived else ''}{gpu.capacity_bytes / GIB:.2f}"


def _bf16(gpu: GpuSpec) -> str:
    return _number(gpu.dense_tflops.bf16) if gpu.has_bf16 else "no"


def _short_link(link: LinkSpec | None) -> str:
    """Leave out what stands in brackets: ``RoCE (24 x 200 GbE)``."""
    return f"{link.kind.split(' (')[0]} {link.bytes_per_s / GB:g}" if link else _UNKNOWN


def _rate(bytes_per_s: int | None) -> str:
    return "" if bytes_per_s is None else f"{bytes_per_s / GB:,.7g} GB/s"


def _per_second(bytes_per_s: int | None) -> str:
    return _UNKNOWN if bytes_per_s is None else f"{bytes_per_s / GB:,g}"


def _mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes // MIB:,} MiB"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{round(value, 1 if value < 1000 else 0):,.7g}"


def _cell(value: _Value) -> str:
    """Write a value as CSV and Markdown have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "; ".join(value)
    return "" if value is None else str(value)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[_Value]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(in_markdown(cell) for cell in line)} |" for line in lines)
