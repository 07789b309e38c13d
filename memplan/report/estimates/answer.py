"""The answer first: a line for the job, and one for each GPU: what fits, what it needs, how far it goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec
from memplan.report.estimates.changes import (
    advice_text,
    checkpointing_label,
    gpus_label,
    setup_label,
)
from memplan.search.advice import nearest
from memplan.training.choices import Offload
from memplan.training.jobs import ROLES, JobKind, OtherModel
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.memory.runtime import ByteRange
    from memplan.report.terminal.console import Console, Text
    from memplan.search.advice import Hints
    from memplan.training.adapters import Adapter

Rows = Sequence[Sequence[Estimate]]
"""A row for each setup, which holds it on every GPU asked for."""

VERDICT_STYLES = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.OOM: "bold red",
    Verdict.STATES_FIT: "cyan",
}
_DOT = " · "


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuAnswer:
    """What is to be said of one GPU."""

    chosen: Estimate
    """The simplest setup that fits; where none does, the one that comes nearest."""
    gpu: GpuSpec
    words: str
    needed: "ByteRange"
    largest: int | None
    """The largest micro-batch that fits; None: it was not looked for."""
    advice: str
    """What would make it fit; empty where it does."""


def machinery(setup: TrainingSetup) -> tuple[int, int]:
    """How much an engine does beyond plain data parallelism: offloading first, then sharding."""
    offloads = [setup.offload_optimizer, setup.offload_param]
    moved = sum(place is not Offload.NONE for place in offloads)
    if setup.chosen_engine is Engine.DDP:
        return moved, 0
    if setup.chosen_engine is Engine.DEEPSPEED and setup.zero_stage is not None:
        return moved, 1 + setup.zero_stage.value
    return moved, 4


def simplest_first(rows: Rows) -> list[Sequence[Estimate]]:
    """Rows by their machinery: DDP, the stages and FSDP2, then what offloads."""
    return sorted(rows, key=lambda row: machinery(row[0].setup))


def best_places(rows: Rows) -> list[tuple[int, str]]:
    """For each GPU, the number of the row that its line is about, and the GPU's id."""
    places = []
    for column in zip(*rows, strict=True):
        gpu = column[0].gpu
        if gpu is not None:
            number = _chosen(column)
            if column[number].job_verdict in (Verdict.FITS, Verdict.TIGHT):
                places.append((number, gpu.gpu_id))
    return places


def _chosen(column: Sequence[Estimate]) -> int:
    """The row with the best verdict, of these the simplest; where all are OOM, the nearest."""
    for verdict in (Verdict.FITS, Verdict.STATES_FIT, Verdict.TIGHT):
        found = [number for number, each in enumerate(column) if each.job_verdict is verdict]
        if found:
            return min(found, key=lambda number: machinery(column[number].setup))
    return nearest(column)


def gpu_answers(rows: Rows, hints: "Hints | None" = None) -> list[GpuAnswer]:
    """What to say of each GPU; rows are the simplest first."""
    largest = hints.largest if hints is not None else {}
    advice = {
        each.answer.gpu.gpu_id: advice_text(each)
        for each in (hints.advice if hints is not None else ())
        if each.answer.gpu is not None
    }
    found = []
    for column in zip(*rows, strict=True):
        number = _chosen(column)
        chosen = column[number]
        gpu = chosen.gpu
        if gpu is None:
            continue
        found.append(
            GpuAnswer(
                chosen=chosen,
                gpu=gpu,
                words=_words(column, number),
                needed=chosen.total_bytes,
                largest=largest.get((number, gpu.gpu_id)),
                advice=advice.get(gpu.gpu_id, ""),
            )
        )
    return found


def verdict_words(verdict: Verdict | None) -> str:
    """``does not fit``: what a table writes shorter.

    >>> verdict_words(Verdict.OOM), verdict_words(Verdict.TIGHT)
    ('does not fit', 'tight')
    """
    return "does not fit" if verdict is Verdict.OOM else str(verdict)


def _words(column: Sequence[Estimate], number: int) -> str:
    """``fits from ZeRO-1``."""
    chosen = column[number]
    verdict = chosen.job_verdict
    assert verdict is not None
    if len(column) == 1:
        if chosen.host_verdict is Verdict.OOM and chosen.verdict is not Verdict.OOM:
            return f"{verdict_words(chosen.verdict)}, but not the CPU RAM"
        return verdict_words(verdict)
    label = setup_label(chosen.setup)
    if verdict is Verdict.OOM:
        return f"nothing fits, nearest {label}"
    others = column[number + 1 :]
    upward = number and others and all(each.job_verdict is Verdict.FITS for each in others)
    return f"{verdict.value} {'from' if upward and verdict is Verdict.FITS else 'with'} {label}"


def needed_text(needed: "ByteRange") -> str:
    """``17.0-18.1``, in GiB."""
    return f"{needed.low / GIB:,.1f}-{needed.high / GIB:,.1f}"


def capacity_text(gpu: GpuSpec) -> str:
    """``31.7 GiB``, with a mark where no reading is known."""
    return f"{'~' if gpu.is_capacity_derived else ''}{gpu.capacity_bytes / GIB:,.1f} GiB"


def params_text(answer: Estimate, word: str = "") -> str:
    """``8.03B, 6.82M trained``: the model's own, what an adapter adds apart."""
    trained = answer.trainable_params
    own = answer.num_params - (trained if answer.setup.adapter is not None else 0)
    told = format_count(own) + word
    return told if trained == answer.num_params else f"{told}, {format_count(trained)} trained"


def _job_text(setup: TrainingSetup) -> str:
    """``dpo with a reference model``: whatever holds a model of its own."""
    job, has_adapter = setup.job, setup.adapter is not None
    held = [
        role
        for role in ROLES
        if not isinstance(other := job.other(role, has_adapter=has_adapter), OtherModel)
        or other is OtherModel.SAME
    ]
    words = " and ".join(f"a {role} model" for role in held)
    return f"{job.kind.value} with {words}" if held else job.kind.value


def adapter_text(adapter: "Adapter", others: Sequence["Adapter | None"]) -> str:
    """``LoRA 16``: the kind, and its rank where it has one."""
    kind, _, rest = str(adapter).partition(" rank ")
    if not rest:
        return kind.partition(" on ")[0]
    return f"{kind} {spread([getattr(each, 'rank', 0) for each in others])}"


def head_parts(rows: Rows) -> list[str]:
    """The job in a few words, what the rows have in common."""
    first = rows[0][0]
    setup = first.setup
    nodes = f" on {setup.nodes} nodes" if setup.nodes > 1 else ""
    count = params_text(first)
    tokens = f"{spread([row[0].setup.seq_len or 0 for row in rows])} tokens"
    if setup.target_seq_len != setup.seq_len:
        tokens += f" in, {setup.target_seq_len:,} out"
    batch = f"micro-batch {spread([row[0].setup.micro_batch_size for row in rows])}"
    if setup.gradient_accumulation_steps > 1:
        batch += f" x {setup.gradient_accumulation_steps}"
    parts = [f"{first.model.name} ({first.model.task.value})", count, f"{gpus_label(setup)}{nodes}"]
    if setup.adapter is not None:
        parts.insert(2, adapter_text(setup.adapter, [row[0].setup.adapter for row in rows]))
    if setup.job.kind is not JobKind.SFT:
        parts.insert(2, _job_text(setup))
    if len(rows) == 1:
        names = dict.fromkeys(each.setup.chosen_precision.value for each in rows[0])
        own = f", {setup_label(setup)}" if setup.num_gpus > 1 or machinery(setup) > (0, 0) else ""
        parts[-1] += own
        parts.append(" or ".join(names))
    kept = checkpointing_label(setup)
    checkpointing = "no checkpointing" if kept == "none" else f"checkpointing {kept}"
    return [*parts, tokens, batch, f"{setup.optimizer.value}, {checkpointing}"]


def spread(sizes: Sequence[int]) -> str:
    """One size, or the range of several.

    >>> spread([2048, 2048]), spread([1, 3])
    ('2,048', '1-3')
    """
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def print_answer(
    console: "Console",
    rows: Rows,
    hints: "Hints | None" = None,
    question: "TimeQuestion | None" = None,
) -> None:
    """Print the answer for each GPU, what the run takes there where its length is asked for, and the job."""
    answers = gpu_answers(rows, hints)
    print_verdicts(console, answers, [each.gpu.short_name for each in answers])
    if question is not None and question.has_length:
        _print_runs(console, [each.chosen for each in answers], question)
    print_job(console, head_parts(rows))


def _print_runs(console: "Console", chosen: Sequence[Estimate], question: "TimeQuestion") -> None:
    """Print what the whole run takes with the setup that each GPU's line is about."""
    from memplan.report.estimates.times import run_text, timed  # which most are not asked for

    for each in chosen:
        run = timed(each, question).run
        if run is not None:
            name = f"{each.gpu.short_name}: " if each.gpu is not None and len(chosen) > 1 else ""
            _print_indented(console, f"{name}{run_text(run, question)}")


def print_verdicts(
    console: "Console",
    answers: Sequence[GpuAnswer],
    names: Sequence[str],
    *,
    with_advice: bool = True,
) -> None:
    """Print a line for each answer, and below it what would make it fit; ``names`` stand before them."""
    lines = [_line_parts(each) for each in answers]
    left = max(map(len, names), default=0) + GAP
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_wide = left + sum(widths) + 3 * (len(widths) - 1) <= console.width
    for each, name, parts in zip(answers, names, lines, strict=True):
        _print_verdict(console, each, name.ljust(left), parts, widths if is_wide else None)
        if with_advice and each.advice:
            _print_indented(console, each.advice)


def _print_verdict(
    console: "Console",
    answer: GpuAnswer,
    name: str,
    parts: Sequence[str],
    widths: Sequence[int] | None,
) -> None:
    """Print a GPU's line; where there is no room for it, what it needs stands below."""
    from memplan.report.terminal.console import Text

    line = Text(name)
    line.append(parts[0], style=VERDICT_STYLES[answer.chosen.job_verdict or Verdict.OOM])
    if widths is not None:
        padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
        line.append((padded[0][len(parts[0]) :] + "   " + "   ".join(padded[1:])).rstrip())
    console.print(line)
    if widths is None:
        for text in _joined(list(filter(None, parts[1:])), console.width):
            _print_indented(console, text)


def print_job(console: "Console", parts: Sequence[str]) -> None:
    """Print the job in as many lines as it takes, each of whole parts."""
    from memplan.report.terminal.console import Text

    line, is_first = "", True
    for part in parts:
        if line and len(line) + len(_DOT) + len(part) > console.width:
            _print_job_line(console, Text(line), is_first=is_first)
            line, is_first = "", False
        line = f"{line}{_DOT}{part}" if line else part
    _print_job_line(console, Text(line), is_first=is_first)


def _print_job_line(console: "Console", line: "Text", *, is_first: bool) -> None:
    """The first begins with the model's name."""
    if is_first:
        line.stylize("bold", 0, line.plain.find(" ") if " " in line.plain else None)
    console.print(line)


INDENT = 2
GAP = 2


def _joined(parts: list[str], width: int) -> list[str]:
    """The parts in one line, where there is room for it."""
    text = "   ".join(parts)
    return [text] if 2 * INDENT + len(text) <= width else parts


def _print_indented(console: "Console", text: str) -> None:
    """Print a line below a GPU's own, its continuation as far in."""
    from textwrap import wrap

    for line in wrap(text, console.width - 2 * INDENT, break_on_hyphens=False):
        console.print(" " * 2 * INDENT + line, markup=False, soft_wrap=True)


def _line_parts(answer: GpuAnswer) -> tuple[str, str, str]:
    """The verdict, what it needs, the largest micro-batch."""
    needs = f"needs {needed_text(answer.needed)} of {capacity_text(answer.gpu)}"
    chosen = answer.chosen
    if chosen.deciding_phase in ("load", "save"):
        needs += f" to {chosen.deciding_phase}"
    if chosen.node_memory_bytes is not None:
        node = chosen.node_memory_bytes / GIB
        needs += f", CPU RAM {chosen.host_bytes / GIB:,.1f} of {node:,.1f} GiB"
    return answer.words, needs, batch_text(answer.largest)


def batch_text(largest: int | None) -> str:
    """``batch <= 3``; nothing where it is not known, or none fits."""
    return f"batch <= {largest}" if largest else ""
