"""An estimate as people read it: one account, or setups side by side with a verdict per GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.memory.account import ComponentKind
from memplan.memory.engine_options import loads_under_zero_init
from memplan.training.precision import Engine
from memplan.training.setup import Offload, TrainingSetup
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from memplan.search.advice import Hints

VERDICT_STYLES = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.OOM: "bold red",
    Verdict.STATES_FIT: "cyan",
}
MARKDOWN_COLUMNS = (
    "engine", "zero_stage", "offload_optimizer", "offload_param", "micro_batch_size", "seq_len",
    "precision", "checkpointing", "gpu", "peak_bytes", "peak_phase", "deciding_phase",
    "total_low_bytes", "total_high_bytes", "host_bytes", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""


def print_comparison(
    console: "Console",
    rows: Sequence[Sequence[Estimate]],
    hints: "Hints | None" = None,
    *,
    reserved: bool = False,
) -> None:
    """Print one line per setup; each row holds the same setup on every GPU asked for."""
    from rich.text import Text

    _print_head(console, rows[0][0], common_assumptions(rows))
    narrow = console.width < NARROW_COLUMNS
    console.print(comparison_table(rows, narrow=narrow, hints=hints, reserved=reserved))
    print_advice(console, hints)
    for line in [*footnotes(rows, hints), *([RESERVED_LINE] if reserved else [])]:
        console.print(Text(line, style="dim"))


def print_account(
    console: "Console",
    estimates: Sequence[Estimate],
    hints: "Hints | None" = None,
    *,
    reserved: bool = False,
) -> None:
    """Print one setup's bytes by component and phase, then the verdict on every GPU."""
    from rich.text import Text

    _print_head(console, estimates[0], estimates[0].assumptions)
    for group in kernel_groups(estimates):
        console.print(account_table(group[0]))
        console.print(verdict_table(group, hints, reserved=reserved))
    print_advice(console, hints)
    for line in [*footnotes([estimates]), *([RESERVED_LINE] if reserved else [])]:
        console.print(Text(line, style="dim"))


def print_advice(console: "Console", hints: "Hints | None") -> None:
    """Print one line for each GPU that nothing fits: what is missing, and what would help."""
    from rich.text import Text

    from memplan.report.changes import advice_text

    for each in hints.advice if hints is not None else ():
        answer = each.answer
        gpu = answer.gpu.gpu_id if answer.gpu is not None else ""
        console.print(Text(f"{gpu}, {setup_label(answer.setup)}: {advice_text(each)}"))


def common_assumptions(rows: Sequence[Sequence[Estimate]]) -> list[str]:
    """What was assumed for every row on every GPU."""
    return [
        text
        for text in rows[0][0].assumptions
        if all(text in each.assumptions for row in rows for each in row)
    ]


def _print_head(console: "Console", first: Estimate, assumptions: Sequence[str]) -> None:
    """Print the model and the job in a line, then what was assumed of either."""
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
    print_assumptions(console, model.assumptions, assumptions)


def print_assumptions(
    console: "Console", of_model: Sequence[str], assumptions: Sequence[str]
) -> None:
    """Print what was assumed: a line for each thing of the model's, one for all of the setup's."""
    from rich.text import Text

    for text in of_model:
        console.print(Text(f"Assumed: {text}", style="dim"))
    others = [text for text in assumptions if text not in of_model]
    console.print(Text("Assumed: " + ", ".join(others), style="dim"))


NARROW_COLUMNS = 110
"""Below this width the GPUs' names are broken at their hyphens."""


RESERVED_LINE = (
    "reserved: what PyTorch's allocator holds on a card with room; nvidia-smi shows that, the CUDA "
    "context and NCCL"
)


def comparison_table(
    rows: Sequence[Sequence[Estimate]],
    *,
    narrow: bool,
    hints: "Hints | None" = None,
    reserved: bool = False,
) -> "Table":
    """One line per setup (and attention kernel), one verdict column per GPU."""
    table = _table()
    labels = [setup_label(row[0].setup) for row in rows]
    # With the largest micro-batches in three columns, 80 columns leave the longest label no room.
    room = SHORT_LABEL if hints is not None and narrow else max(map(len, labels))
    table.add_column("setup", overflow="fold", min_width=min(room, max(map(len, labels))))
    more = ("needed", "reserved") if reserved else ()
    for name in ("GiB\nper GPU", *more, "peak in", "CPU GiB\nper node"):
        table.add_column(name, justify="left" if name == "peak in" else "right", no_wrap=True)
    gpus = [each.gpu for each in rows[0] if each.gpu is not None]
    best = {gpu.gpu_id: simplest_fit(rows, gpu.gpu_id) for gpu in gpus}
    largest = hints.largest if hints is not None else {}
    width = VERDICT_WIDTH + max((len(f" {size}") for size in largest.values()), default=0)
    for gpu in gpus:
        name = gpu.gpu_id.replace("-", "-\n") if narrow else gpu.gpu_id
        table.add_column(name, no_wrap=True, min_width=width)
    for number, row in enumerate(rows):
        groups = shown_groups(row)
        for group in groups:
            first = max(group, key=lambda each: each.peak_bytes)
            label = setup_label(first.setup)
            if len(groups) > 1:
                label += _apart(group, groups)
            held = {each.gpu.gpu_id: each for each in group if each.gpu is not None}
            cells = [
                verdict_text(
                    held[gpu.gpu_id],
                    best=held[gpu.gpu_id] is best[gpu.gpu_id],
                    largest=largest.get((number, gpu.gpu_id)),
                )
                if gpu.gpu_id in held
                else ""
                for gpu in gpus
            ]
            table.add_row(
                label,
                plain_gib(first.peak_bytes),
                *(_replayed_cells(group) if reserved else ()),
                "\n".join(
                    dict.fromkeys([first.peak_phase, *filter(None, map(deciding_text, group))])
                ),
                plain_gib(first.host_bytes) if first.host_bytes else "-",
                *cells,
            )
    return table


def _replayed_cells(group: Sequence[Estimate]) -> tuple[str, str]:
    """What the segments must be, and what they are with room: the highest of a group."""
    return (
        plain_gib(max(each.required_bytes for each in group)),
        plain_gib(max(each.reserved_bytes for each in group)),
    )


SHORT_LABEL = 16
"""Columns for an engine and an offloaded optimizer."""
VERDICT_WIDTH = 6
"""Columns for ``fits`` and its mark."""


def simplest_fit(rows: Sequence[Sequence[Estimate]], gpu_id: str) -> Estimate | None:
    """The setup that fits a GPU with the least machinery: no offload, then the least sharding."""
    fitting = [
        each
        for row in rows
        for each in row
        if each.gpu is not None and each.gpu.gpu_id == gpu_id and each.verdict is Verdict.FITS
    ]
    return min(fitting, key=lambda each: machinery(each.setup), default=None)


def best_places(rows: Sequence[Sequence[Estimate]]) -> list[tuple[int, str]]:
    """For each GPU, the row that holds its simplest fit, and the GPU's id."""
    return [
        (number, each.gpu.gpu_id)
        for number, row in enumerate(rows)
        for each in row
        if each.gpu is not None and each is simplest_fit(rows, each.gpu.gpu_id)
    ]


def machinery(setup: TrainingSetup) -> tuple[int, int]:
    """How much an engine does beyond plain data parallelism: offloading first, then sharding."""
    offloads = [setup.offload_optimizer, setup.offload_param]
    moved = sum(place is not Offload.NONE for place in offloads)
    if setup.chosen_engine is Engine.DDP:
        return moved, 0
    if setup.chosen_engine is Engine.DEEPSPEED and setup.zero_stage is not None:
        return moved, 1 + setup.zero_stage.value
    return moved, 4


def kernel_groups(estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    """Estimates of one setup, apart where the GPU changes the kernel or the precision."""
    groups: dict[tuple[str, str], list[Estimate]] = {}
    for each in estimates:
        key = (each.attention_kernel, each.setup.chosen_precision.value)
        groups.setdefault(key, []).append(each)
    return list(groups.values())


ALIKE = 1.02
"""Figures of one setup on several GPUs that differ by less stand in one line, the highest shown."""


def shown_groups(estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    """``kernel_groups``, or one of all where it makes next to no difference."""
    peaks = [each.peak_bytes for each in estimates]
    if max(peaks) <= ALIKE * min(peaks):
        return [list(estimates)]
    return kernel_groups(estimates)


def _differ_a_little(row: Sequence[Estimate]) -> bool:
    return len(shown_groups(row)) == 1 and len({each.peak_bytes for each in row}) > 1


def _apart(group: Sequence[Estimate], groups: Sequence[Sequence[Estimate]]) -> str:
    """What tells a group from the others of its setup: its kernel, its precision."""
    own, parts = group[0], []
    others = [each for other in groups if other is not group for each in other]
    if any(each.attention_kernel != own.attention_kernel for each in others):
        parts.append(own.attention_kernel)
    if any(each.setup.chosen_precision is not own.setup.chosen_precision for each in others):
        parts.append(own.setup.chosen_precision.value.partition("-")[0])
    return "".join(f", {part}" for part in parts)


def setup_label(setup: TrainingSetup) -> str:
    """A setup in a few words: engine, stage, what is offloaded."""
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        stage = setup.zero_stage.value if setup.zero_stage is not None else 2
        label = f"ZeRO-{stage}"
    elif engine is Engine.DDP:
        label = "DDP" if setup.num_gpus > 1 else "one GPU"
    else:
        label = engine.value.upper()
        if setup.fsdp_strategy is not None and setup.fsdp_strategy.value != "full_shard":
            label += f" {setup.fsdp_strategy.value}"
    moved = [
        name
        for name, place in (("opt", setup.offload_optimizer), ("param", setup.offload_param))
        if place is not Offload.NONE
    ]
    if moved:
        places = {setup.offload_optimizer, setup.offload_param} - {Offload.NONE}
        label += f", {'/'.join(sorted(each.value for each in places))} {'+'.join(moved)}"
    return label


def deciding_text(answer: Estimate) -> str:
    """``load 87.0``, in GiB, where loading or saving decides the verdict; else nothing."""
    if answer.verdict is answer.step_verdict:
        return ""
    return f"{answer.deciding_phase} {answer.worst_bytes / GIB:,.1f}"


def verdict_text(estimate: Estimate, *, best: bool = False, largest: int | None = None) -> "Text":
    """The verdict in words and colour; a mark on the simplest setup that fits.

    ``largest`` is the largest micro-batch that fits, where it is known and there is one.
    """
    from rich.text import Text

    verdict = estimate.verdict
    if verdict is None:
        return Text("")
    mark = f" {largest}" if largest else ""
    mark += f" {BEST_MARK}" if best else ""
    return Text(verdict.value + mark, style=VERDICT_STYLES[verdict])


BEST_MARK = "<"


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


def verdict_table(
    estimates: Sequence[Estimate], hints: "Hints | None" = None, *, reserved: bool = False
) -> "Table":
    """GPU, its memory, what the run needs of it, the verdict, the largest micro-batch."""
    table = _table()
    table.add_column("GPU", no_wrap=True)
    for name in ("usable", "needed", *(("reserved",) if reserved else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    if hints is not None:
        table.add_column("largest batch", justify="right", no_wrap=True)
    for each in estimates:
        if each.gpu is None:
            continue
        total = each.total_bytes
        needed = f"{total.low / GIB:,.1f} - {total.high / GIB:,.1f} GiB"
        mark = "~" if each.gpu.capacity_note else ""
        largest = []
        if hints is not None:
            size = hints.largest.get((0, each.gpu.gpu_id))
            largest = [str(size) if size else "-"]
        table.add_row(
            each.gpu.gpu_id,
            mark + gib(each.gpu.capacity_bytes),
            needed,
            *((gib(each.reserved_bytes),) if reserved else ()),
            verdict_text(each).append(f", {text}" if (text := deciding_text(each)) else ""),
            *largest,
        )
    return table


def footnotes(rows: Sequence[Sequence[Estimate]], hints: "Hints | None" = None) -> list[str]:
    """What the reader has to know, each line once."""
    nccl = ", NCCL and" if rows[0][0].setup.num_gpus > 1 else " and"
    lines = [
        (
            "GiB = 2^30 bytes, allocated by PyTorch. A card needs what its caching allocator must "
            f"have to complete the run{nccl} the CUDA context, as a range: fits = its high end does, "
            "tight = the GPU's memory is inside it, OOM = its low end exceeds the GPU."
        )
    ]
    lines += precision_lines(rows)
    answers = [each for row in rows for each in row]
    kernels = " or ".join(dict.fromkeys(each.attention_kernel for each in answers))
    if len(rows) == 1:
        lines.append(f"* the peak; attention kernel: {kernels}")
    elif any(each.verdict is Verdict.FITS for each in answers):
        lines.append(
            f"{BEST_MARK} the simplest setup that fits: least offloading, then least sharding; "
            f"attention kernel: {kernels}"
        )
    else:
        lines.append(f"Attention kernel: {kernels}")
    if len(rows) > 1 and any(_differ_a_little(row) for row in rows):
        lines.append("Where GPUs differ in precision or kernel by under 2 %, the higher figure")
    if hints is not None and any(hints.largest.values()):
        lines.append("The number after a verdict: the largest micro-batch that fits")
    elif (
        hints is not None
        and not hints.largest
        and len(rows) > 1
        and not any(each.unmodelled for each in answers)
    ):
        lines.append("Name a GPU (--gpu h100) to see the largest micro-batch beside each row")
    if len(rows) > 1 and any(loads_under_zero_init(each.setup) for row in rows for each in row):
        lines.append(ZERO_INIT_LINE)
    for row in rows:
        for each in row:
            lines += each.notes
            lines += each.left_out_notes
    return list(dict.fromkeys(lines))


ZERO_INIT_LINE = (
    "ZeRO-3 loads under zero.Init, as transformers does; for a loop of your own without it: "
    "--engine-option zero_init=false"
)


def precision_lines(rows: Sequence[Sequence[Estimate]]) -> list[str]:
    """Each engine's precision where they differ, and apart for GPUs that have another one."""
    columns: dict[str, list[Estimate]] = {}
    for column in zip(*rows, strict=True):
        held = {each.setup.chosen_engine: each.setup.chosen_precision.value for each in column}
        text = ", ".join(f"{engine.value} {name}" for engine, name in held.items())
        columns.setdefault(text, []).append(column[0])
    if len(columns) > 1:
        return [f"Precision on {_gpu_names(some)}: {text}" for text, some in columns.items()]
    (text,) = columns
    if len(set(text.replace(",", "").split()[1::2])) > 1:
        return [f"Precision, each engine's default: {text}"]
    return []


def _gpu_names(estimates: Sequence[Estimate]) -> str:
    gpus = [each.gpu for each in estimates if each.gpu is not None]
    names = " and ".join(gpu.gpu_id for gpu in gpus)
    return names if all(gpu.has_bf16 for gpu in gpus) else f"{names} (no bf16)"


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
