"""What was assumed of an answer, and what its reader has to know, in few lines or in full."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate
from memplan.estimator.assumptions import Topic
from memplan.report.estimates.answer import Rows
from memplan.report.estimates.changes import engine_name
from memplan.report.estimates.columns import (
    short_names,
)
from memplan.report.terminal.blocks import hanging

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console


def common_assumptions(rows: Rows) -> list[str]:
    """What was assumed for every row on every GPU."""
    return [
        text
        for text in rows[0][0].assumptions
        if all(text in each.assumptions for row in rows for each in row)
    ]


def print_assumptions(
    console: "Console", of_model: Sequence[str], assumptions: Sequence[str]
) -> None:
    """Print all that was assumed: a line for each thing of the model's, one for all of the setup's."""
    for text in of_model:
        print_dim(console, f"Assumed: {text}")
    others = [text for text in assumptions if text not in of_model]
    print_dim(console, "Assumed: " + ", ".join(others))


def print_dim(console: "Console", line: str) -> None:
    """Print a line beside the answer; no word is broken."""
    _print_lines(console, line, "dim")


def print_plain(console: "Console", line: str) -> None:
    """Print a line of the answer; no word is broken."""
    _print_lines(console, line, "")


def _print_lines(console: "Console", line: str, style: str) -> None:
    from memplan.report.terminal.console import Text

    for each in hanging(line, console.width):
        console.print(Text(each, style=style), soft_wrap=True)


def assumed_lines(rows: Rows, width: int) -> list[str]:
    """What was assumed, in at most three lines: training, precision, kernels.

    What a line has no room for is counted; what the line of the job says is not said again. What was assumed of the
    model itself stands above them, whole: a key that was not read is no default.
    """
    answers = [each for row in rows for each in row]
    of_model = answers[0].model.assumptions
    assumed = common_assumptions(rows) if len(rows) > 1 else rows[0][0].assumptions
    topics: dict[Topic, list[str]] = {topic: [] for topic in Topic}
    for text in assumed:
        if text not in of_model:
            topics[getattr(text, "topic", Topic.TRAINING)].append(text)
    topics[Topic.KERNELS] = _kernel_words(topics[Topic.KERNELS], answers)
    if lines := precision_lines(rows):
        topics[Topic.PRECISION] = [short_precision(rows)] if len(lines) > 1 else [
            lines[0].removeprefix("Precision, ")
        ]  # fmt: skip
    told = {
        "Training": topics[Topic.TRAINING],
        "Precision": topics[Topic.PRECISION],
        "Kernels": topics[Topic.KERNELS],
    }
    lines = [_cut(f"{name}: ", texts, width) for name, texts in told.items() if texts]
    return [*model_lines(answers[0]), *lines]


def model_lines(answer: Estimate) -> list[str]:
    """What was assumed of the model, a line each."""
    return [f"Model: {text}" for text in answer.model.assumptions]


def _kernel_words(texts: Sequence[str], answers: Sequence[Estimate]) -> list[str]:
    """Whose kernels, and behind the kind of attention what computes it in the end."""
    run = " or ".join(dict.fromkeys(each.attention_kernel for each in answers))
    words = [text.removeprefix("kernels ") for text in texts]
    return [
        f"{each} ({run})" if each.startswith("attention ") and run not in each else each
        for each in words
    ]


def short_precision(rows: Rows) -> str:
    """Where cards differ: each engine's own, and which cards have no bf16."""
    lacking = [each for each in rows[0] if each.gpu is not None and not each.gpu.has_bf16]
    without = f", fp16 on {short_names(lacking)} (no bf16)" if lacking else ""
    return f"each engine's default{without}"


def _cut(head: str, texts: Sequence[str], width: int) -> str:
    """As many of the texts as a line has room for, and how many more there are."""
    for count in range(len(texts), 0, -1):
        more = len(texts) - count
        line = head + ", ".join(texts[:count]) + (f", {more} more" if more else "")
        if len(line) <= width:
            return line
    return f"{head}{texts[0][: max(0, width - len(head) - 4)].rpartition(' ')[0]} ..."


def print_assumed(console: "Console", rows: Rows, *, everything: bool = False) -> None:
    """Print what was assumed of the model and the job, each engine's precision, and the kernels."""
    if not everything:
        for line in assumed_lines(rows, console.width):
            print_dim(console, line)
        return
    answers = [each for row in rows for each in row]
    assumed = common_assumptions(rows) if len(rows) > 1 else rows[0][0].assumptions
    kernels = " or ".join(dict.fromkeys(each.attention_kernel for each in answers))
    print_assumptions(
        console, answers[0].model.assumptions, [*assumed, f"attention kernel {kernels}"]
    )
    for line in precision_lines(rows):
        print_dim(console, line)


def notes(rows: Rows) -> list[str]:
    """What the reader has to know of these figures, each line once."""
    lines: list[str] = []
    for row in rows:
        for each in row:
            lines += each.all_notes
            lines += each.left_out_notes
    return list(dict.fromkeys(lines))


def print_notes(console: "Console", rows: Rows, *, everything: bool = False) -> None:
    """Print the notes; what a preset fills in is counted, unless everything is asked for."""
    found = notes(rows)
    for line in found if everything else shown_notes(found):
        print_dim(console, line)


PRESET_NOTE = "preset "
"""How notes begin that say what a preset filled in."""


def shown_notes(found: Sequence[str]) -> list[str]:
    """The notes with those of a preset in one.

    >>> shown_notes(["preset nemo: optimizer adam", "preset nemo: seq_len 2048", "something else"])
    ['preset nemo fills in 2 settings: --assumptions lists them', 'something else']
    """
    counts: dict[str, int] = {}
    others = []
    for note in found:
        name, colon, _ = note.partition(": ")
        if colon and note.startswith(PRESET_NOTE):
            counts[name] = counts.get(name, 0) + 1
        else:
            others.append(note)
    told = [
        f"{name} fills in {count} setting{'s' if count > 1 else ''}: --assumptions lists them"
        for name, count in counts.items()
    ]
    return [*told, *others]


def precision_lines(rows: Rows) -> list[str]:
    """Each engine's precision where they differ, and which GPUs have another one."""
    columns: dict[str, list[Estimate]] = {}
    for column in zip(*rows, strict=True):
        held = {engine_name(each.setup): each.setup.chosen_precision.value for each in column}
        text = ", ".join(f"{name} {precision}" for name, precision in held.items())
        if len(held) == 1:
            (text,) = held.values()
        columns.setdefault(text, []).append(column[0])
    if len(columns) == 1:
        (text,) = columns
        differ = len({each.setup.chosen_precision for row in rows for each in row}) > 1
        return [f"Precision, each engine's default: {text}"] if differ else []
    return [
        f"Precision on {short_names(some)}{_lacking(some)}: {text}"
        for text, some in columns.items()
    ]


def _lacking(estimates: Sequence[Estimate]) -> str:
    gpus = [each.gpu for each in estimates if each.gpu is not None]
    return "" if all(gpu.has_bf16 for gpu in gpus) else " (no bf16)"
