"""An estimate as people read it: one account, or setups side by side with a verdict per GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.memory.account import ComponentKind
from memplan.training.precision import Engine
from memplan.training.setup import Offload, TrainingSetup
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

VERDICT_STYLES = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.OOM: "bold red",
    Verdict.STATES_FIT: "cyan",
}
MARKDOWN_COLUMNS = (
    "engine", "zero_stage", "offload_optimizer", "offload_param", "micro_batch_size", "seq_len",
    "precision", "checkpointing", "gpu", "peak_bytes", "peak_phase", "total_low_bytes",
    "total_high_bytes", "host_bytes", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""


def print_comparison(console: "Console", rows: Sequence[Sequence[Estimate]]) -> None:
    """Print one line per setup; each row holds the same setup on every GPU asked for."""
    from rich.text import Text

    _print_head(console, rows[0][0])
    console.print(comparison_table(rows))
    for line in footnotes(rows):
        console.print(Text(line, style="dim"))


def print_account(console: "Console", estimates: Sequence[Estimate]) -> None:
    """Print one setup's bytes by component and phase, then the verdict on every GPU."""
    from rich.text import Text

    _print_head(console, estimates[0])
    for group in kernel_groups(estimates):
        console.print(account_table(group[0]))
        console.print(verdict_table(group))
    for line in footnotes([estimates]):
        console.print(Text(line, style="dim"))


def _print_head(console: "Console", first: Estimate) -> None:
    from rich.text import Text

    model, setup = first.model, first.setup
    nodes = f" on {setup.nodes} nodes" if setup.nodes > 1 else ""
    gpus = f"{setup.num_gpus} GPU{'s' if setup.num_gpus > 1 else ''}{nodes}"
    head = Text.assemble(
        (model.name, "bold"),
        f" ({model.task.value}), {format_count(first.num_params)} parameters, {gpus}",
    )
    if first.trainable_params != first.num_params:
        head.append(f", {format_count(first.trainable_params)} trained")
    console.print(head)
    console.print(Text("Assumed: " + ", ".join(first.assumptions), style="dim"))


def comparison_table(rows: Sequence[Sequence[Estimate]]) -> "Table":
    """One line per setup (and attention kernel), one verdict column per GPU."""
    table = _table()
    table.add_column("setup", overflow="fold")
    for name in ("per GPU", "peak in", "per node CPU"):
        table.add_column(name, justify="left" if name == "peak in" else "right", no_wrap=True)
    gpus = [each.gpu for each in rows[0] if each.gpu is not None]
    for gpu in gpus:
        table.add_column(gpu.gpu_id, overflow="fold")
    for row in rows:
        for group in kernel_groups(row):
            first = group[0]
            label = setup_label(first.setup)
            if len(kernel_groups(row)) > 1:
                label += f", {first.attention_kernel} attention"
            held = {each.gpu.gpu_id: each for each in group if each.gpu is not None}
            cells = [
                verdict_text(held[gpu.gpu_id]) if gpu.gpu_id in held else "" for gpu in gpus
            ]
            table.add_row(
                label, gib(first.peak_bytes), first.peak_phase, gib(first.host_bytes), *cells
            )
    return table


def kernel_groups(estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    """Estimates of one setup, apart where the GPU changes which kernel runs."""
    groups: dict[str, list[Estimate]] = {}
    for each in estimates:
        groups.setdefault(each.attention_kernel, []).append(each)
    return list(groups.values())


def setup_label(setup: TrainingSetup) -> str:
    """A setup in a few words: engine, stage, what is offloaded."""
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = setup.zero_stage.value if setup.zero_stage is not None else 2
        label = f"ZeRO-{stage}"
    elif engine is Engine.DDP:
        label = "DDP" if setup.num_gpus > 1 else "one GPU"
    else:
        label = engine.value.upper().replace("FSDP1", "FSDP1")
        if setup.fsdp_strategy is not None and setup.fsdp_strategy.value != "full_shard":
            label += f" {setup.fsdp_strategy.value}"
    moved = [
        name
        for name, place in (
            ("optimizer", setup.offload_optimizer),
            ("parameters", setup.offload_param),
        )
        if place is not Offload.NONE
    ]
    if moved:
        place = setup.offload_optimizer if setup.offload_optimizer.value != "none" else (
            setup.offload_param
        )  # fmt: skip
        label += f", {' + '.join(moved)} on {place.value.upper()}"
    return label


def verdict_text(estimate: Estimate) -> "Text":
    """The verdict in words and colour, with the range for the eye."""
    from rich.text import Text

    verdict = estimate.verdict
    if verdict is None:
        return Text("")
    return Text(verdict.value, style=VERDICT_STYLES[verdict])


def account_table(estimate: Estimate) -> "Table":
    """Components down, phases across, each phase at its own peak."""
    table = _table()
    table.add_column(f"GiB, {setup_label(estimate.setup)}", no_wrap=True)
    phases = list(estimate.phases.values())
    for phase in phases:
        mark = " *" if phase.name == estimate.peak_phase else ""
        table.add_column(phase.name + mark, justify="right", no_wrap=True)
    for kind in ComponentKind:
        values = [phase.components.get(kind.label, 0) for phase in phases]
        if any(values):
            cells = [plain_gib(value) if value else "" for value in values]
            table.add_row(kind.label.replace("_", " "), *cells)
    table.add_section()
    table.add_row("peak", *[plain_gib(phase.peak_bytes) for phase in phases], style="bold")
    return table


def verdict_table(estimates: Sequence[Estimate]) -> "Table":
    """GPU, its memory, what nvidia-smi would show, the verdict."""
    table = _table()
    table.add_column("GPU", no_wrap=True)
    for name in ("usable", "needed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for each in estimates:
        if each.gpu is None:
            continue
        total = each.total_bytes
        needed = f"{total.low / GIB:,.1f} - {total.high / GIB:,.1f} GiB"
        mark = "~" if each.gpu.capacity_note else ""
        table.add_row(
            each.gpu.gpu_id, mark + gib(each.gpu.capacity_bytes), needed, verdict_text(each)
        )
    return table


def footnotes(rows: Sequence[Sequence[Estimate]]) -> list[str]:
    """What the reader has to know, each line once."""
    lines = [
        "GiB = 2^30 bytes, allocated by PyTorch. The verdict adds fragmentation, "
        + ("NCCL and the CUDA context" if rows[0][0].setup.num_gpus > 1 else "the CUDA context")
        + ", as a range: fits = its high end does, tight = the GPU's memory is inside it, "
        "OOM = its low end exceeds the GPU."
    ]
    if len(rows) == 1 and rows[0][0].account.phases:
        lines.append(f"* the peak; {rows[0][0].attention_kernel} attention")
    for row in rows:
        for each in row:
            lines += each.notes
            lines += [f"Left out: {text}" for text in each.account.left_out]
    return list(dict.fromkeys(lines))


def gib(num_bytes: int) -> str:
    """A table cell: two decimals and the unit; a dash for nothing."""
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes else "-"


def plain_gib(num_bytes: int) -> str:
    """Two decimals, where the unit stands in the header."""
    return f"{num_bytes / GIB:,.2f}"


def _table() -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
