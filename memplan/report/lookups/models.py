"""The built-in models, and one model's parameters by component."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator.notes import tying_note
from memplan.fast_dataclass import dataclass
from memplan.graph.counts import ParameterCounts
from memplan.graph.module_tree import ModuleNode
from memplan.model.checkpoint import CheckpointCount
from memplan.model.spec import ModelSpec, Tying
from memplan.report.rows.written import rows_csv, rows_json, rows_markdown
from memplan.report.terminal.blocks import Column, print_blocks
from memplan.report.terminal.narrow import print_table
from memplan.units import format_count

if TYPE_CHECKING:
    from rich.tree import Tree

    from memplan.report.terminal.console import Console

MODELS_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogRow:
    """One built-in model, as the list shows it."""

    name: str
    family: str
    hub_id: str
    aliases: tuple[str, ...]


def model_rows(model: ModelSpec, counts: ParameterCounts) -> list[dict[str, object]]:
    """One model as a single flat row."""
    row: dict[str, object] = {
        "name": model.name,
        "family": model.family,
        "task": model.task.value,
        "source": model.source,
        "total_params": counts.total,
        "base_model_params": counts.base,
        "largest_layer_params": counts.largest_layer,
        "untied_params": counts.untied,
        "active_params": counts.active,
        "tying": model.tying.value,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "checkpoint_dtype": model.checkpoint_dtype.label,
    }
    for name, count in counts.components:
        row[f"{name.replace('-', '_')}_params"] = count
    return [row]


def write_rows(rows: Sequence[dict[str, object]], output_format: str) -> str:
    """Rows as JSON, CSV or Markdown."""
    if output_format == "json":
        return rows_json(rows, schema_version=MODELS_SCHEMA_VERSION)
    return rows_csv(rows) if output_format == "csv" else rows_markdown(rows)


def checkpoint_rows(found: Sequence[CheckpointCount]) -> list[dict[str, object]]:
    """Flat rows: each reading of a checkpoint's size."""
    return [
        {
            "format": each.format,
            "size_read_as": each.unit,
            "checkpoint_bytes": each.num_bytes,
            "num_params": each.num_params,
        }
        for each in found
    ]


def print_checkpoint(console: "Console", found: Sequence[CheckpointCount]) -> None:
    """Print how many parameters a checkpoint has, by format and by what its size may mean."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("if it holds", "and its size is in", "bytes", "parameters", ""):
        is_figure = name in ("bytes", "parameters", "")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=True)
    for each in found:
        count = f"{each.num_params:,}"
        table.add_row(
            each.format,
            each.unit or "bytes",
            f"{each.num_bytes:,}",
            count,
            format_count(each.num_params),
        )
    print_table(console, table)
    if any(each.unit for each in found):
        line = "GB = 10^9 bytes, GiB = 2^30: what is meant by GB is often GiB."
        console.print(Text(line, style="dim"))
    line = "A checkpoint of a training run holds the optimizer too, which is not in these counts."
    console.print(Text(line, style="dim"))


def print_catalog(console: "Console", models: Sequence[CatalogRow]) -> None:
    """Print the list of built-in models."""
    _print_columns(
        console,
        f"{len(models)} models; `memplan models qwen` counts those, `memplan models NAME` shows one",
        [
            Column(header=("model",), cells=tuple(row.name for row in models)),
            Column(header=("family",), cells=tuple(row.family for row in models), gives_way=1),
            Column(
                header=("on the Hugging Face hub",), cells=tuple(row.hub_id for row in models),
                gives_way=2,
            ),
        ],
    )  # fmt: skip


def _print_columns(console: "Console", head: str, columns: Sequence[Column]) -> None:
    """Print a line, and below it the columns for which there is room: what is named stays whole."""
    console.print(head, markup=False)
    console.print()
    for line in print_blocks(console.width, columns[0], columns[1:]):
        console.print(line, soft_wrap=True)


def size_rows(models: Sequence[tuple[ModelSpec, str]]) -> list[dict[str, object]]:
    """Models and their hub ids as flat rows, by family, smallest first."""
    rows: list[dict[str, object]] = [
        {
            "name": model.name,
            "family": model.family,
            "total_params": model.num_params,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "hub_id": hub_id,
        }
        for model, hub_id in models
    ]
    return sorted(rows, key=lambda row: (row["family"], row["total_params"]))


def print_sizes(console: "Console", rows: Sequence[dict[str, object]]) -> None:
    """Print models with their sizes."""
    figures = {
        "parameters": ("total_params", 0),
        "layers": ("num_layers", 1),
        "hidden": ("hidden_size", 2),
        "context": ("context_length", 0),
    }
    _print_columns(
        console,
        f"{len(rows)} models; `memplan models NAME` shows where one's parameters are",
        [
            Column(header=("model",), cells=tuple(str(row["name"]) for row in rows)),
            *(
                Column(
                    header=(header,), is_figure=True, gives_way=order,
                    cells=tuple(_figure(name, row[name]) for row in rows),
                )
                for header, (name, order) in figures.items()
            ),
            Column(header=("family",), cells=tuple(str(row["family"]) for row in rows), gives_way=3),
        ],
    )  # fmt: skip


def _figure(name: str, value: object) -> str:
    return format_count(int(str(value))) if name == "total_params" else f"{value:,}"


def print_model(console: "Console", model: ModelSpec, counts: ParameterCounts) -> None:
    """Print one model: its sizes, and where its parameters are."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    size = f"{format_count(counts.total)}, {counts.total:,} parameters"
    kind = f"{model.family}, {model.task.value}"
    console.print(Text.assemble((model.name, "bold"), f": {size} ({kind})"))
    console.print(Text(f"read from {model.source}", style="dim"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("component")
    for name in ("parameters", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, count in counts.components:
        table.add_row(name, f"{count:,}", f"{count / counts.total:.1%}")
    table.add_section()
    table.add_row("total", f"{counts.total:,}", format_count(counts.total), style="bold")
    table.add_row("base model", f"{counts.base:,}", format_count(counts.base))
    if counts.active != counts.total:
        table.add_row("active per token", f"{counts.active:,}", format_count(counts.active))
    table.add_row("largest layer", f"{counts.largest_layer:,}", format_count(counts.largest_layer))
    print_table(console, table)
    for line in _shape_lines(model, counts):
        console.print(Text(line, style="dim"))


def print_tree(console: "Console", root: ModuleNode) -> None:
    """Print the module tree, one line a module, equal layers once."""
    from rich.table import Table
    from rich.tree import Tree

    tree = Tree("", hide_root=True, guide_style="dim")
    _grow(tree, root, console.width)
    table = Table.grid()
    table.add_column()
    table.add_row(tree)
    console.print(table)


def _grow(tree: "Tree", node: ModuleNode, width: int) -> None:
    from rich.text import Text

    shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in node.shapes.items())
    times = f"{node.count} x " if node.count > 1 else ""
    line = Text.assemble(
        (node.name, "bold" if node.children else ""),
        f"  {times}{node.num_params:,}",
        (f"  {shapes}" if shapes else "", "dim"),
        no_wrap=width >= TREE_COLUMNS,
    )
    branch = tree.add(line)
    for child in node.children.values():
        _grow(branch, child, width)


TREE_COLUMNS = 80
"""From this width on a module is one line."""


def _shape_lines(model: ModelSpec, counts: ParameterCounts) -> list[str]:
    sizes = (
        f"{model.num_layers} layers, hidden size {model.hidden_size:,}, vocabulary "
        f"{model.vocab_size:,}, context {model.context_length:,} tokens"
    )
    lines = [sizes]
    lines += model.assumptions
    if model.activations_left_out:
        lines.append(f"In estimates, left out: {model.activations_left_out}")
    if model.tying is Tying.AMBIGUOUS:
        lines.append(tying_note(model, tied=counts.total, untied=counts.untied))
    return lines
