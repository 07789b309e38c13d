"""A sweep as people read it: a row for each setup and a column for each GPU, or a matrix."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import loads_under_zero_init
from memplan.report.changes import checkpointing_label, setup_label
from memplan.report.estimate import ZERO_INIT_LINE, deciding_text
from memplan.search.sweep import Sweep, SweepResult
from memplan.training.setup import TrainingSetup
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

MARKDOWN_COLUMNS = (
    "num_gpus", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer", "offload_param",
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "precision", "checkpointing",
    "gpu", "peak_bytes", "peak_phase", "deciding_phase", "total_low_bytes", "total_high_bytes",
    "host_bytes", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""
STYLES = {
    Verdict.FITS: "green", Verdict.TIGHT: "yellow", Verdict.OOM: "bold red",
    Verdict.STATES_FIT: "cyan",
}  # fmt: skip
HEAT_STYLES = {
    Verdict.FITS: "black on green", Verdict.TIGHT: "black on yellow",
    Verdict.OOM: "bold white on red", Verdict.STATES_FIT: "black on cyan",
}  # fmt: skip
MARKS = {Verdict.FITS: "", Verdict.TIGHT: "~", Verdict.OOM: "!", Verdict.STATES_FIT: "?"}
"""A verdict where there is room for one character, and no colour."""


class Figure(StrEnum):
    """What a matrix shows."""

    PEAK = "peak"
    """Allocated at the fullest moment of a step."""
    TOTAL = "total"
    """What nvidia-smi would show, the high end of the range."""
    HEADROOM = "headroom"
    """What that leaves of the GPU; below zero where it does not fit."""
    HOST = "host"
    """CPU memory of a node."""


def sweep_rows(results: Iterable[SweepResult]) -> Iterator[dict[str, object]]:
    """Flat rows for scripts: one for each setup and GPU, made one by one."""
    for result in results:
        for each in result.estimates:
            yield each.to_dict()


# -- the table -----------------------------------------------------------------------------------

_COLUMNS: "Mapping[str, Callable[[TrainingSetup], str]]" = {
    "precision": lambda setup: setup.chosen_precision.value,
    "optimizer": lambda setup: setup.optimizer.value,
    "kernels": lambda setup: _kernels(setup),
    "dropout": lambda setup: "config" if setup.dropout is None else f"{setup.dropout:g}",
    "frozen": lambda setup: str(setup.freeze) or "nothing",
    "tokens": lambda setup: _tokens(setup),
    "checkpointing": checkpointing_label,
    "batch": lambda setup: str(setup.micro_batch_size),
    "accumulated": lambda setup: str(setup.gradient_accumulation_steps),
    "parallel": lambda setup: _degrees(setup),
    "nodes": lambda setup: str(setup.nodes),
    "GPUs": lambda setup: str(setup.num_gpus),
    "setup": setup_label,
}
"""What a table can say of a setup; what never varies goes to the head."""
_SECTION = 8
"""How many of the columns head a section, and are written once in it."""
_ALWAYS = ("GPUs", "setup")
_NUMBERS = frozenset({"tokens", "batch", "accumulated", "nodes", "GPUs"})
_HEAD_WORDS = {
    "tokens": "{} tokens", "batch": "micro-batch {}", "accumulated": "accumulated {} times",
    "checkpointing": "checkpointing {}", "precision": "{}", "optimizer": "{}",
    "kernels": "kernels {}", "dropout": "dropout {}", "frozen": "frozen: {}", "GPUs": "{} GPUs",
    "nodes": "{} nodes", "parallel": "{}", "setup": "{}",
}  # fmt: skip
_SILENT = {
    "nodes": "1",
    "dropout": "config",
    "frozen": "nothing",
    "parallel": "",
    "accumulated": "1",
}
"""What needs no word in the head."""


def _said(name: str, result: SweepResult) -> str:
    """What a column says of a setup; cards without bf16 may run it in another precision."""
    column = _COLUMNS[name]
    return " or ".join(dict.fromkeys(column(each.setup) for each in result.estimates))


def _tokens(setup: TrainingSetup) -> str:
    if setup.target_seq_len in (None, setup.seq_len):
        return str(setup.seq_len)
    return f"{setup.seq_len}+{setup.target_seq_len}"


def _kernels(setup: TrainingSetup) -> str:
    chosen = setup.chosen_kernels
    preset = getattr(setup.kernels, "value", "own")
    return f"{preset}, {chosen.attention.value} attention"


def _degrees(setup: TrainingSetup) -> str:
    degrees = {
        "TP": setup.tensor_parallel, "PP": setup.pipeline_parallel, "CP": setup.context_parallel,
        "EP": setup.expert_parallel,
    }  # fmt: skip
    return " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)


def print_sweep(console: "Console", sweep: Sweep, results: Sequence[SweepResult]) -> None:
    """Print one line per setup, one column per GPU with the peak and the verdict."""
    from rich.text import Text

    shown = _varying(results)
    print_head(console, results, shown)
    console.print(sweep_table(results, shown))
    for line in footnotes(sweep, results):
        console.print(Text(line, style="dim"))


def print_head(console: "Console", results: Sequence[SweepResult], shown: Sequence[str]) -> None:
    """Print the model, and what is the same in all setups."""
    from rich.text import Text

    first = results[0].estimates[0]
    console.print(
        Text.assemble(
            (first.model.name, "bold"),
            f" ({first.model.task.value}), {format_count(first.num_params)} parameters, ",
            f"{len(results)} setup{'' if len(results) == 1 else 's'}",
        )
    )
    same = [
        _HEAD_WORDS[name].format(text)
        for name in _COLUMNS
        if name not in shown and (text := _said(name, results[0])) != _SILENT.get(name)
    ]
    console.print(Text("Everywhere: " + ", ".join(same), style="dim"))


def _varying(results: Sequence[SweepResult]) -> list[str]:
    """The columns in which setups differ, and those that are always shown."""
    found = []
    for name in _COLUMNS:
        values = {_said(name, result) for result in results}
        if len(values) > 1 or name in _ALWAYS:
            found.append(name)
    return found


def sweep_table(results: Sequence[SweepResult], shown: Sequence[str]) -> "Table":
    """The table itself; what heads a section is written once in it."""
    table = _table()
    for name in shown:
        side: JustifyMethod = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name != "setup")
    for each in results[0].estimates:
        name = each.gpu.short_name if each.gpu is not None else "peak"
        table.add_column(name, justify="right", overflow="fold")
    heading = [name for name in shown if list(_COLUMNS).index(name) < _SECTION]
    before: list[str] | None = None
    for result in results:
        cells = {name: _said(name, result) for name in shown}
        section = [cells[name] for name in heading]
        if before is not None and section != before and _breaks(results, heading):
            table.add_section()
        if section == before:
            cells.update(dict.fromkeys(heading, ""))
        before = section
        table.add_row(*cells.values(), *[peak_cell(each) for each in result.estimates])
    return table


def _breaks(results: Sequence[SweepResult], heading: Sequence[str]) -> bool:
    """Whether sections hold more than one row, so that a line between them helps."""
    sections = {tuple(_said(name, each) for name in heading) for each in results}
    return len(sections) < len(results)


def peak_cell(answer: Estimate) -> "Text":
    """The peak and the verdict."""
    from rich.text import Text

    peak = f"{answer.peak_bytes / GIB:,.1f}"
    if answer.verdict is None:
        return Text(peak)
    lines = [f"{peak} {answer.verdict.value}", *filter(None, [deciding_text(answer)])]
    return Text("\n".join(lines), style=STYLES[answer.verdict])


# -- the matrix ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """What a matrix shows, and by what."""

    figure: Figure = Figure.PEAK
    rows: str = "batch"
    columns: str = "gpus"

    @property
    def hidden(self) -> frozenset[str]:
        """Columns of a table that a matrix needs no title for: its axes, and what follows from them."""
        axes = {_AXES[self.rows], _AXES[self.columns]}
        return frozenset(axes.union(*(_FOLLOWS.get(each, ()) for each in axes)))


_AXES = {
    "batch": "batch", "gpus": "GPUs", "seq-len": "tokens", "checkpointing": "checkpointing",
    "precision": "precision", "optimizer": "optimizer", "kernels": "kernels",
    "dropout": "dropout", "freeze": "frozen", "accumulation": "accumulated",
    "nodes": "nodes", "setup": "setup", "gpu": "gpu",
}  # fmt: skip
"""What a matrix may be laid out by, as it is typed, and the column that says it."""
PIVOT_AXES = tuple(_AXES)
_FOLLOWS = {"GPUs": ("nodes",), "batch": ("accumulated",)}


def print_pivot(
    console: "Console", sweep: Sweep, results: Sequence[SweepResult], pivot: Pivot
) -> None:
    """Print one matrix for every other combination and each GPU type."""
    from rich.text import Text

    varying = [name for name in _varying(results) if name not in pivot.hidden]
    print_head(console, results, [*varying, *pivot.hidden])
    for title, cells in pivots(results, varying, pivot).items():
        console.print(Text(title, style="bold"))
        console.print(pivot_table(cells, pivot))
    legend = _PIVOT_LEGEND.format(
        _AXES[pivot.rows], _AXES[pivot.columns], FIGURE_WORDS[pivot.figure]
    )
    if pivot.figure is Figure.PEAK and any(map(deciding_text, _answers(results))):
        legend += ". Where loading or saving decides, the matrix says so"
    console.print(Text(legend, style="dim"))
    for line in footnotes(sweep, results)[1:]:
        console.print(Text(line, style="dim"))


def _answers(results: Sequence[SweepResult]) -> Iterator[Estimate]:
    return (each for result in results for each in result.estimates)


FIGURE_WORDS = {
    Figure.PEAK: "the peak that PyTorch allocates",
    Figure.TOTAL: "what nvidia-smi would show at the most",
    Figure.HEADROOM: "what is left of the GPU at the least",
    Figure.HOST: "CPU memory of a node",
}
_PIVOT_LEGEND = (
    "Rows: {}, columns: {}; {}, in GiB = 2^30 bytes. ! out of memory, ~ tight, no mark: fits"
)

Cells = dict[tuple[str, str], Estimate]
"""What the row and the column say -> the estimate."""


def _placed(answer: Estimate, axis: str) -> str:
    """What an axis says of an estimate."""
    column = _AXES[axis]
    if column in _COLUMNS:
        return _COLUMNS[column](answer.setup)
    return answer.gpu.short_name if answer.gpu is not None else "any"


def pivots(
    results: Sequence[SweepResult], varying: Sequence[str], pivot: Pivot
) -> dict[str, Cells]:
    """One matrix for each GPU type and each combination of what else varies."""
    found: dict[str, Cells] = {}
    by_gpu = "gpu" not in (pivot.rows, pivot.columns)
    for each in _answers(results):
        words = [_HEAD_WORDS[name].format(_COLUMNS[name](each.setup)) for name in varying]
        gpu = [each.gpu.short_name] if by_gpu and each.gpu is not None else []
        title = ", ".join([*gpu, *filter(None, words)])
        place = (_placed(each, pivot.rows), _placed(each, pivot.columns))
        found.setdefault(title, {})[place] = each
    return found


def _ordered(values: Iterable[str]) -> list[str]:
    """Numbers by size, words as they came."""
    found = list(dict.fromkeys(values))
    return sorted(found, key=int) if all(each.isdecimal() for each in found) else found


def pivot_table(cells: Cells, pivot: Pivot) -> "Table":
    """One matrix: a heat map in colour, marks in plain text."""
    from rich.text import Text

    table = _table()
    rows, columns = (_ordered(place[side] for place in cells) for side in (0, 1))
    table.add_column(
        f"{_AXES[pivot.rows]} \\ {_AXES[pivot.columns]}", justify="right", no_wrap=True
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        line = [Text(row)]
        for column in columns:
            answer = cells.get((row, column))
            line.append(Text("") if answer is None else figure_cell(answer, pivot.figure))
        table.add_row(*line)
    return table


def figure_cell(answer: Estimate, figure: Figure) -> "Text":
    """One figure of an estimate, coloured and marked by the verdict."""
    from rich.text import Text

    text = f"{figure_bytes(answer, figure) / GIB:,.1f}"
    verdict = answer.verdict
    if verdict is None:
        return Text(text)
    if figure is Figure.PEAK:
        text = deciding_text(answer) or text
    return Text(f"{text}{MARKS[verdict] or ' '}", style=HEAT_STYLES[verdict])


def figure_bytes(answer: Estimate, figure: Figure) -> int:
    """The figure a matrix shows [bytes]."""
    if figure is Figure.PEAK:
        return answer.peak_bytes
    if figure is Figure.HOST:
        return answer.host_bytes
    high = answer.total_bytes.high
    if figure is Figure.TOTAL or answer.gpu is None:
        return high
    return answer.gpu.capacity_bytes - high


# -- below the table -----------------------------------------------------------------------------


def _precision_notes(results: Sequence[SweepResult]) -> list[str]:
    """On which cards fp16 stands in for bf16."""
    cards = [
        each.gpu.short_name
        for result in results
        for each in result.estimates
        if " or " in _said("precision", result) and each.gpu is not None and not each.gpu.has_bf16
    ]
    names = " and ".join(dict.fromkeys(cards))
    return [f"Of two precisions, fp16 is on {names}: no bf16 there"] if names else []


def footnotes(sweep: Sweep, results: Sequence[SweepResult]) -> list[str]:
    """What the reader has to know, each line once."""
    units = (
        "Peak per GPU in GiB = 2^30 bytes, as PyTorch allocates. A card needs what its caching "
        "allocator must have to complete the run, NCCL and the CUDA context, as a range: fits = its "
        "high end does, tight = the GPU's memory is inside it, OOM = its low end exceeds the GPU."
    )
    lines = [units]
    if not sweep.exact and any(
        each.verdict is Verdict.TIGHT for result in results for each in result.estimates
    ):
        lines.append("tight is undecided here: runs are not replayed; --exact replays them")
    assumed = [f"Assumed: {text}" for text in sweep.model.assumptions]
    lines += [*assumed, *_precision_notes(results), *kernel_notes(results)]
    if any(loads_under_zero_init(result.setup) for result in results):
        lines.append(ZERO_INIT_LINE)
    for result in results:
        for each in result.estimates:
            lines += each.notes
            lines += each.left_out_notes
    lines += impossible_notes(sweep)
    return list(dict.fromkeys(lines))


def kernel_notes(results: Sequence[SweepResult]) -> list[str]:
    """Which attention kernels run where, if the GPUs differ in it."""
    kernels: dict[str, dict[str, None]] = {}
    for result in results:
        for each in result.estimates:
            name = each.gpu.short_name if each.gpu is not None else "any GPU"
            kernels.setdefault(name, {})[each.attention_kernel] = None
    if len({tuple(found) for found in kernels.values()}) < 2:
        return []
    words = [f"{' or '.join(found)} on {name}" for name, found in kernels.items()]
    return [f"Attention kernels: {', '.join(words)}"]


def impossible_notes(sweep: Sweep) -> list[str]:
    """What the grid asks for and cannot be, with the number of combinations."""
    return [
        f"Left out, {count} combination{'' if count == 1 else 's'}: {reason}"
        for reason, count in sweep.impossible.items()
    ]


def _table() -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
