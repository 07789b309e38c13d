"""A sweep as people read it: a row for each setup, and what each GPU says of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.memory.engine_options import loads_under_zero_init
from memplan.memory.runtime import ByteRange
from memplan.report.estimates.answer import VERDICT_STYLES, capacity_text, needed_text, params_text
from memplan.report.estimates.changes import checkpointing_label, offload_label, sharing_label
from memplan.report.estimates.columns import host_column
from memplan.report.estimates.printed import ZERO_INIT_LINE, times_by_card
from memplan.report.terminal.blocks import Column, hanging, has_room, print_blocks
from memplan.search.sweep import Sweep, SweepResult
from memplan.training.precision import PRECISIONS, Precision
from memplan.training.setup import TrainingSetup
from memplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.terminal.console import Console, Text

MARKDOWN_COLUMNS = (
    "num_gpus", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer", "offload_param",
    "micro_batch_size", "gradient_accumulation_steps", "seq_len", "precision", "checkpointing",
    "gpu", "peak_bytes", "peak_phase", "deciding_phase", "total_low_bytes", "total_high_bytes",
    "host_bytes", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""


def sweep_rows(
    results: Iterable[SweepResult], question: "TimeQuestion | None" = None
) -> Iterator[dict[str, object]]:
    """Flat rows for scripts: one for each setup and GPU, made one by one; with times if asked for."""
    if question is not None:
        from memplan.report.estimates.times import time_row  # which most are not asked for

        for result in results:
            for each in result.estimates:
                yield each.to_dict() | time_row(each, question)
        return
    for result in results:
        for each in result.estimates:
            yield each.to_dict()


COLUMNS: "Mapping[str, Callable[[TrainingSetup], str]]" = {
    "precision": lambda setup: setup.chosen_precision.value,
    "optimizer": lambda setup: setup.optimizer.value,
    "kernels": lambda setup: _kernels(setup),
    "dropout": lambda setup: "config" if setup.dropout is None else f"{setup.dropout:g}",
    "frozen": lambda setup: str(setup.freeze) or "nothing",
    "base": lambda setup: _base(setup),
    "tokens": lambda setup: _tokens(setup),
    "checkpointing": checkpointing_label,
    "batch": lambda setup: str(setup.micro_batch_size),
    "accumulated": lambda setup: str(setup.gradient_accumulation_steps),
    "parallel": lambda setup: _degrees(setup),
    "nodes": lambda setup: str(setup.nodes),
    "GPUs": lambda setup: str(setup.num_gpus),
    "setup": sharing_label,
}
"""What a table can say of a setup; what never varies goes to the head."""
_SECTION = 9
"""How many of the columns head a section, and are written once in it."""
_ALWAYS = ("setup",)
_NUMBERS = frozenset({"tokens", "batch", "accumulated", "nodes", "GPUs"})
_HEAD_WORDS = {
    "tokens": "{} tokens", "batch": "micro-batch {}", "accumulated": "accumulated {} times",
    "checkpointing": "checkpointing {}", "precision": "{}", "optimizer": "{}",
    "kernels": "kernels {}", "dropout": "dropout {}", "frozen": "frozen: {}", "base": "base {}", "GPUs": "{} GPUs",
    "nodes": "{} nodes", "parallel": "{}", "setup": "{}",
}  # fmt: skip
_SILENT = {
    "nodes": "1",
    "dropout": "config",
    "frozen": "nothing",
    "base": "as loaded",
    "parallel": "",
    "accumulated": "1",
}
"""What needs no word in the head."""


def in_words(name: str, text: str) -> str:
    """What a column says, in words that need no header.

    >>> in_words("GPUs", "8"), in_words("GPUs", "1"), in_words("batch", "4")
    ('8 GPUs', '1 GPU', 'micro-batch 4')
    """
    words = _HEAD_WORDS[name].format(text)
    return words.removesuffix("s") if text == "1" else words


def _said(name: str, result: SweepResult) -> str:
    """What a column says of a setup; cards without bf16 may run it in another precision."""
    column = COLUMNS[name]
    return " or ".join(dict.fromkeys(column(each.setup) for each in result.estimates))


def _base(setup: TrainingSetup) -> str:
    how = setup.chosen_quantization
    return how.kind.value if how is not None else "as loaded"


def _tokens(setup: TrainingSetup) -> str:
    if setup.target_seq_len in (None, setup.seq_len):
        return f"{setup.seq_len:,}"
    return f"{setup.seq_len:,}+{setup.target_seq_len:,}"


def _kernels(setup: TrainingSetup) -> str:
    chosen = setup.chosen_kernels
    preset = getattr(setup.kernels, "value", "own")
    return f"{preset}, {chosen.attention.value} attention"


def _degrees(setup: TrainingSetup) -> str:
    degrees = {
        "TP": setup.tensor_parallel, "PP": setup.pipeline_parallel, "CP": setup.context_parallel,
        "EP": setup.expert_parallel,
    }  # fmt: skip
    found = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    if setup.sequence_parallel:
        found[0] += "+SP"
    return " ".join(found)


def print_sweep(
    console: "Console",
    sweep: Sweep,
    results: Sequence[SweepResult],
    *,
    question: "TimeQuestion | None" = None,
) -> None:
    """Print one line per setup, what it allocates, the verdict of each GPU, and times if asked for."""
    from memplan.report.terminal.console import Text

    shown = varying_columns(results)
    print_counts(console, results)
    print_head(console, results, shown)
    console.print()
    for line in sweep_lines(console.width, results, shown, question):
        console.print(line, soft_wrap=True)
    console.print()
    for note in footnotes(sweep, results):
        console.print(Text(note, style="dim"))


def print_head(console: "Console", results: Sequence[SweepResult], shown: Sequence[str]) -> None:
    """Print the model, and what is the same in all setups."""
    from memplan.report.terminal.console import Text

    first = results[0].estimates[0]
    console.print(
        Text.assemble(
            (first.model.name, "bold"),
            f" ({first.model.task.value}), {params_text(first, ' parameters')}, ",
            f"{len(results)} setup{'' if len(results) == 1 else 's'}",
        )
    )
    same = [
        in_words(name, text)
        for name in COLUMNS
        if name not in shown
        and len(_values(name, results)) == 1
        and (text := _said(name, results[0])) != _SILENT.get(name)
    ]
    for line in hanging("Everywhere: " + ", ".join(same), console.width):
        console.print(Text(line, style="dim"))


def varying_columns(results: Sequence[SweepResult]) -> list[str]:
    """The columns in which setups differ on their own, and those that are always shown."""
    counts = {name: len(_values(name, results)) for name in COLUMNS}
    with_nodes = {(result.setup.num_gpus, result.setup.nodes) for result in results}
    if len(with_nodes) == counts["GPUs"]:
        counts["nodes"] = 1  # they follow from the GPUs
    return [name for name, count in counts.items() if count > 1 or name in _ALWAYS]


def _values(name: str, results: Sequence[SweepResult]) -> set[str]:
    return {_said(name, result) for result in results}


def print_counts(console: "Console", results: Sequence[SweepResult]) -> None:
    """Print how many of the setups fit each GPU."""
    from memplan.report.terminal.console import Text

    columns = [
        column
        for column in zip(*(result.estimates for result in results), strict=True)
        if column[0].gpu is not None
    ]
    names = [column[0].gpu.short_name for column in columns if column[0].gpu is not None]
    # Setup by setup, while its run is there: only the latest few are kept, and playing one out is most of an answer.
    rows = [
        [(each.job_verdict, each.total_bytes) for each in row] for row in zip(*columns, strict=True)
    ]
    for name, column, told in zip(names, columns, zip(*rows, strict=True), strict=True):
        verdicts = [verdict for verdict, _ in told]
        counts = [
            f"{verdicts.count(verdict)} {word}"
            for verdict, word in _COUNT_WORDS.items()
            if verdict in verdicts
        ]
        counts = [
            each.replace("1 do not", "1 does not") if each[:2] == "1 " else each for each in counts
        ]
        counts[0] = counts[0].replace(" ", f" of {len(verdicts)} ", 1)
        gpu, needed = column[0].gpu, [total for _, total in told]
        assert gpu is not None
        least, most = min(each.low for each in needed), max(each.high for each in needed)
        console.print(
            Text(
                f"{name.ljust(max(map(len, names)))}  {', '.join(counts)}   needs "
                f"{needed_text(ByteRange(least, most))} of {capacity_text(gpu)}"
            )
        )


_COUNT_WORDS = {
    Verdict.FITS: "fit", Verdict.STATES_FIT: "states fit", Verdict.TIGHT: "tight",
    Verdict.OOM: "do not fit",
}  # fmt: skip


def sweep_lines(
    width: int,
    results: Sequence[SweepResult],
    shown: Sequence[str],
    question: "TimeQuestion | None" = None,
) -> "Iterator[Text]":
    """The lines of the table; what heads a section is written once in it."""
    columns = list(zip(*(result.estimates for result in results), strict=True))
    answers = columns[0]
    figures = [_card_column(column) for column in columns]
    if (
        any(offload_label(each.setup) for each in answers)
        or answers[0].node_memory_bytes is not None
    ):
        figures.insert(0, host_column(answers))
    if question is not None:
        cards = [dict(enumerate(column)) for column in columns]
        figures += times_by_card(cards, len(results), question)
    said = [{name: _said(name, result) for name in shown} for result in results]
    heading = [name for name in shown if list(COLUMNS).index(name) < _SECTION]
    starts = _section_starts([[each[name] for name in heading] for each in said])
    *before, label = (
        _label_column(name, said, starts if name in heading else None) for name in shown
    )
    if has_room(width, before, label, figures):
        breaks = dict.fromkeys(starts, "") if len(starts) < len(results) else {}
        return print_blocks(width, label, figures, before=before, above=breaks)
    # Where there is no room for columns of words, sections have a line, and labels are one.
    if len(_section_starts([[each[name] for name in shown[:-1]] for each in said])) < len(results):
        heading = [*shown[:-1]]
    starts = _section_starts([[each[name] for name in heading] for each in said])
    above = {start: _in_words(said[start], heading) for start in starts} if heading else {}
    beside = [name for name in shown if name not in heading]
    merged = tuple(_in_words(each, beside) for each in said)
    return print_blocks(width, Column(header=("setup",), cells=merged), figures, above=above)


def _card_column(column: Sequence[Estimate]) -> Column:
    """What each setup allocates on a GPU, the verdict, and what is needed of it."""
    peaks = [f"{each.worst_bytes / GIB:,.1f}" for each in column]
    gpu = column[0].gpu
    if gpu is None:
        return Column(header=("peak",), cells=tuple(peaks), is_figure=True)
    verdicts = [each.verdict.value if each.verdict is not None else "" for each in column]
    needed = [needed_text(each.total_bytes) for each in column]
    phases = ["" if each.worst_bytes == each.peak_bytes else each.deciding_phase for each in column]
    parts = [_padded(peaks, str.rjust), _padded(verdicts, str.ljust), _padded(needed, str.rjust)]
    second = "peak".ljust(len(parts[0][0]) + len(parts[1][0]) + 2) + "needs"
    if any(phases):
        parts.append(phases)
    return Column(
        header=(f"{gpu.short_name}, {capacity_text(gpu)}", second),
        cells=tuple(" ".join(each).rstrip() for each in zip(*parts, strict=True)),
        styles=tuple(VERDICT_STYLES[each.verdict] if each.verdict else "" for each in column),
    )


def _padded(texts: Sequence[str], side: "Callable[[str, int], str]") -> list[str]:
    width = max(map(len, texts))
    return [side(text, width) for text in texts]


def _section_starts(sections: Sequence[Sequence[str]]) -> list[int]:
    """The rows with which another section begins."""
    return [row for row, section in enumerate(sections) if not row or section != sections[row - 1]]


def _label_column(
    name: str, said: "Sequence[Mapping[str, str]]", starts: Sequence[int] | None
) -> Column:
    """What a column says of each row; at the ``starts`` of sections alone, where there are some."""
    cells = [each[name] if starts is None or row in starts else "" for row, each in enumerate(said)]
    return Column(header=(name,), cells=tuple(cells), is_figure=name in _NUMBERS)


def _in_words(said: "Mapping[str, str]", names: Iterable[str]) -> str:
    return ", ".join(in_words(name, said[name]) for name in names if said[name])


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
    lines = ["GiB = 2^30 bytes; peak: allocated by PyTorch; --legend: every word"]
    assumed = [f"Assumed: {text}" for text in sweep.model.assumptions]
    lines += [*assumed, *_precision_notes(results), *_mixed_notes(results), *kernel_notes(results)]
    if any(loads_under_zero_init(result.setup) for result in results):
        lines.append(ZERO_INIT_LINE)
    for result in results:
        for each in result.estimates:
            lines += [note for note in each.all_notes if note != each.stage_note]
            lines += each.left_out_notes
    lines += impossible_notes(sweep)
    return list(dict.fromkeys(lines))


MIXED_LINE = (
    "Mixed precision saves activations, which are then of 2 bytes a number, not states: 2 + 2 of 16-bit "
    "weights and gradients and 12 of fp32 weights and Adam's two are 16 bytes a parameter, and so are fp32's "
    "4 x 4"
)
"""arXiv:1910.02054, section 3.1, beside Adam in fp32; autocast keeps fp32 weights and gradients too."""


def _mixed_notes(results: Sequence[SweepResult]) -> list[str]:
    """Why states stay, where rows in fp32 stand beside others."""
    found = {result.setup.chosen_precision for result in results}
    formats = [PRECISIONS[each] for each in found]
    is_mixed = any(each.master_weights or each.autocast is not None for each in formats)
    return [MIXED_LINE] if Precision.FP32 in found and is_mixed else []


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
