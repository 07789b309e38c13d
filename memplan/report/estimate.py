"""An estimate as people read it: the answer first, then setups side by side, or one account."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.estimator.assumptions import Topic
from memplan.fast_dataclass import dataclass, replace
from memplan.memory.account import ComponentKind
from memplan.memory.engine_options import loads_under_zero_init
from memplan.memory.replay import MAX_CYCLES
from memplan.memory.runtime import ByteRange
from memplan.report.answer import Rows, print_answer
from memplan.report.blocks import Column, hanging, print_blocks
from memplan.report.changes import engine_name
from memplan.report.columns import (
    allocated_column,
    card_column,
    host_column,
    kernel_groups,
    phase_column,
    plain_gib,
    reserved_column,
    setup_lines,
    short_names,
)
from memplan.training.choices import Offload
from memplan.units import GIB, MIB

if TYPE_CHECKING:
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.report.console import Console
    from memplan.search.advice import Hints


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What is shown of an answer besides."""

    everywhere: bool = True
    """What each setup needs of each GPU, and the largest micro-batch there."""
    legend: bool = False
    assumptions: bool = False
    reserved: bool = False
    lifetimes: bool = False
    question: "TimeQuestion | None" = None
    """The time of each, which a single setup for people is told in any case."""


USUALLY_SHOWN = Shown()


def print_comparison(
    console: "Console", rows: Rows, hints: "Hints | None" = None, shown: Shown = USUALLY_SHOWN
) -> None:
    """Print the answer for each GPU, then one line per setup, the simplest first.

    Each row holds the same setup on every GPU asked for; ``hints`` count the rows as they stand.
    """
    print_answer(console, rows, hints, shown.question)
    console.print()
    label, *others = comparison_columns(
        rows, hints, everywhere=shown.everywhere, reserved=shown.reserved
    )
    if shown.question is not None:
        others += times_by_card(_answers_by_card(rows), len(label.cells), shown.question)
    if shown.lifetimes:
        from memplan.report.lifetimes import lifetime_columns

        others += lifetime_columns([line.first for line in setup_lines(rows)])
    for line in print_blocks(console.width, label, others):
        console.print(line, soft_wrap=True)
    console.print()
    _print_assumed(console, rows, everything=shown.assumptions)
    _print_notes(console, rows, everything=shown.assumptions)
    zero_init = any(loads_under_zero_init(row[0].setup) for row in rows)
    _print_words(console, SHORT_LEGEND, legend=shown.legend, zero_init=zero_init)
    if shown.reserved:
        print_dim(console, RESERVED_LINE)
    if shown.lifetimes:
        from memplan.report.lifetimes import lifetime_words

        for text in lifetime_words():
            print_dim(console, text)


def print_account(
    console: "Console",
    estimates: Sequence[Estimate],
    hints: "Hints | None" = None,
    shown: Shown = USUALLY_SHOWN,
) -> None:
    """Print the verdict on every GPU, then one setup's bytes by component and phase."""
    print_answer(console, [estimates], hints, shown.question)
    from memplan.report.times import speed_lines, time_lines  # which tables do without

    if shown.question is not None:
        console.print()
        for each in estimates:
            for text in time_lines(each, shown.question):
                _print_plain(console, text)
    _print_bytes(console, estimates, lifetimes=shown.lifetimes)
    console.print()
    for text in host_lines(estimates):
        _print_plain(console, text)
    for each in estimates if shown.question is None else ():
        for text in speed_lines(each):
            _print_plain(console, text)
    _print_assumed(console, [estimates], everything=shown.assumptions)
    _print_notes(console, [estimates], everything=shown.assumptions)
    _print_beside(console, estimates, shown)
    _print_words(console, SHORT_ACCOUNT_LEGEND, legend=shown.legend)


def _print_bytes(console: "Console", estimates: Sequence[Estimate], *, lifetimes: bool) -> None:
    """A table by component and phase for each kernel that the cards bring."""
    groups = kernel_groups(estimates)
    for group in groups:
        console.print()
        names = short_names(group) if len(groups) > 1 else ""
        tables = [account_columns(group[0], names)]
        if lifetimes:
            from memplan.report.lifetimes import lifetime_table

            tables.append(lifetime_table(group[0]))
        for number, (label, *others) in enumerate(tables):
            if number:
                console.print()
            for line in print_blocks(console.width, label, others):
                console.print(line, soft_wrap=True)


def _print_beside(console: "Console", estimates: Sequence[Estimate], shown: Shown) -> None:
    """What comes on top of the bytes, and what the allocator makes of them."""
    if shown.reserved or shown.legend:
        for text in beside_lines(estimates):
            print_dim(console, text)
    if not shown.reserved:
        return
    for each in estimates:
        if each.gpu is not None:
            for text in reserved_lines(each, each.gpu.short_name):
                print_dim(console, text)
    print_dim(console, RESERVED_LINE)


MOST_ISLANDS = 4
"""Of one run that are named."""
LEAST_ISLAND_BYTES = 16 * MIB
"""Narrower ones show as a single figure."""


def reserved_lines(answer: Estimate, card: str) -> list[str]:
    """What is reserved on a card with room; what is needed of it, and with what less it lives by luck."""
    run, beside = answer.run, answer.overhead_bytes
    reserved, least = plain_gib(answer.reserved_bytes), plain_gib(run.required_bytes)
    enough = f"{least} GiB for segments are enough, and all that is more"
    lines = [f"On {card}, {reserved} GiB are reserved; {enough}"]
    found = [
        f"{plain_gib(start)}-{plain_gib(end)}"
        for start, end in run.islands()
        if end - start >= LEAST_ISLAND_BYTES
    ]
    if found:
        more = len(found) - MOST_ISLANDS
        named = ", ".join(found[:MOST_ISLANDS]) + (f" and {more} more" if more > 0 else "")
        lines.append(
            f"It would live by luck with {named} GiB for segments too, not with all that lies between; "
            f"beside them {plain_gib(beside.low)}-{plain_gib(beside.high)} GiB"
        )
    if not run.is_settled:
        lines.append(
            f"Steps were not all alike after {MAX_CYCLES} more: with just what is needed a later one may do otherwise"
        )
    return lines


def _answers_by_card(rows: Rows) -> list[dict[int, Estimate]]:
    """For each GPU, its answers by the line of the table that they stand on."""
    lines = list(enumerate(setup_lines(rows)))
    return [
        {
            place: line.first if gpu is None else line.held[gpu.gpu_id]
            for place, line in lines
            if gpu is None or gpu.gpu_id in line.held
        }
        for gpu in (each.gpu for each in rows[0])
    ]


def times_by_card(
    cards: Sequence[Mapping[int, Estimate]], num_lines: int, question: "TimeQuestion"
) -> list[Column]:
    """A step's time and what follows, for each GPU; empty on lines of which it has no answer."""
    from memplan.report.times import time_columns  # which most are not asked for

    found = []
    for held in cards:
        gpu = next(iter(held.values())).gpu
        name = gpu.short_name if gpu is not None and len(cards) > 1 else ""
        for each in time_columns(list(held.values()), question):
            told = dict(zip(held, each.cells, strict=True))
            cells = tuple(told.get(place, "") for place in range(num_lines))
            header = (f"{name} {each.header[0]}".strip(), *each.header[1:])
            found.append(replace(each, header=header, cells=cells))
    return found


RESERVED_LINE = (
    "reserved: what PyTorch's allocator holds on a card with room; nvidia-smi shows that, the CUDA "
    "context and NCCL"
)


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


def _print_plain(console: "Console", line: str) -> None:
    _print_lines(console, line, "")


def _print_lines(console: "Console", line: str, style: str) -> None:
    from memplan.report.console import Text

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
    return [f"{each} ({run})" if each.startswith("attention ") else each for each in words]


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


def _print_assumed(console: "Console", rows: Rows, *, everything: bool = False) -> None:
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


def _print_notes(console: "Console", rows: Rows, *, everything: bool = False) -> None:
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


def comparison_columns(
    rows: Rows, hints: "Hints | None" = None, *, everywhere: bool = True, reserved: bool = False
) -> list[Column]:
    """A column of setups, what each allocates, where and on the host, and one for each GPU.

    ``everywhere``: with what each setup needs of it. ``reserved``: and what the allocator reserves on a card with room.
    """
    lines = list(setup_lines(rows))
    largest = hints.largest if hints is not None else {}
    # Beside every verdict or beside none.
    if len(largest) < sum(len(row) for row in rows):
        largest = {}
    cards = [
        card_column(each.gpu, lines, largest=largest, with_needs=everywhere)
        for each in rows[0]
        if each.gpu is not None
    ]
    return [
        Column(header=("setup",), cells=tuple(line.label for line in lines)),
        allocated_column(lines),
        *([reserved_column(lines)] if reserved else []),
        phase_column(lines),
        host_column([line.first for line in lines]),
        *cards,
    ]


def host_lines(estimates: Sequence[Estimate]) -> list[str]:
    """CPU RAM of a node, when it is needed and what for; each line once."""
    lines = []
    for each in estimates:
        if not each.host_bytes:
            continue
        ranks = each.setup.gpus_per_node
        node = each.node_memory_bytes
        limit = f" of {node / GIB:,.1f} GiB ({each.host_verdict})" if node is not None else " GiB"
        moment, why = host_reason(each)
        shared = f", {ranks} ranks together" if ranks > 1 else ""
        lines.append(
            f"CPU RAM per node: {each.host_bytes / GIB:,.1f}{limit}{shared}, {moment}: {why}"
        )
    return list(dict.fromkeys(lines))


def beside_lines(estimates: Sequence[Estimate]) -> list[str]:
    """What lies beside the allocator's segments, figure by figure, and what all GPUs need together."""
    lines = []
    for each in estimates:
        if each.gpu is None:
            continue
        parts = [f"CUDA context {_range_gib(each.context_bytes)}"]
        if each.nccl_bytes.high:
            parts.append(f"NCCL {_range_gib(each.nccl_bytes)}")
        parts.append(f"fragmentation {each.fragmentation_bytes / GIB:,.2f}")
        text = f"Of what {each.gpu.short_name} needs: {', '.join(parts)} GiB"
        if each.setup.num_gpus > 1:
            together = _range_gib(each.all_gpus_bytes)
            text += f"; {each.setup.num_gpus} GPUs as full as this one: {together} GiB"
        lines.append(text)
    return list(dict.fromkeys(lines))


def _range_gib(found: ByteRange) -> str:
    return f"{found.low / GIB:,.1f}-{found.high / GIB:,.1f}"


def host_formulas(answer: Estimate) -> list[str]:
    """CPU RAM of a node when it loads, between steps and when it saves, with the arithmetic."""
    host, ranks = answer.account.host, answer.setup.gpus_per_node
    if not answer.host_bytes:
        return []
    own = host.save_bytes - (host.writer_bytes if answer.account.rank == 0 else 0)
    moments = (
        ("while loading", host.load_bytes, 0),
        ("between steps", host.held_bytes, 0),
        ("while saving", own, host.writer_bytes),
    )
    lines = [f"CPU RAM of a node: {answer.host_bytes / GIB:,.2f} GiB, the highest of"]
    for moment, each, writer in moments:
        total = ranks * each + writer
        if not total:
            continue
        terms = []
        if each:
            per_param = f"{each / answer.num_params:,.3g} B x {answer.num_params:,} parameters"
            terms.append(f"{ranks} ranks x {per_param}" if ranks > 1 else per_param)
        if writer:
            per_param = f"{writer / answer.num_params:,.3g} B x {answer.num_params:,}"
            terms.append(f"{per_param} on the rank that writes")
        lines.append(f"  {moment} {total / GIB:,.2f} GiB = {' + '.join(terms)}")
    if host.held_bytes:
        locked = ranks * host.pinned_bytes
        share = f"{host.pinned_bytes / host.held_bytes:.0%} of what is held between steps"
        lines.append(f"  page-locked (pin_memory) {locked / GIB:,.2f} GiB, {share}")
    return lines


WEIGHT_BYTES = (2, 4)
"""Of an element of a whole copy of the model, in 16 and 32 bit."""


def host_reason(answer: Estimate) -> tuple[str, str]:
    """When a node's CPU RAM is fullest, and with what."""
    host, setup, ranks = answer.account.host, answer.setup, answer.setup.gpus_per_node
    own = host.save_bytes - (host.writer_bytes if answer.account.rank == 0 else 0)
    fullest = max(ranks * host.held_bytes, ranks * own + host.writer_bytes)
    if ranks * host.load_bytes >= fullest:
        offloaded = " and ".join(
            name
            for name, place in (
                ("the optimizer", setup.offload_optimizer),
                ("the parameters", setup.offload_param),
            )
            if place is not Offload.NONE
        )
        if round(host.load_bytes / answer.num_params, 2) in WEIGHT_BYTES:
            copies = "each rank loads a copy of the model"
            return "while loading", copies if ranks > 1 else "the model"
        if offloaded:
            return "while setting up", f"{offloaded}, and copies that become page-locked"
        return "while loading", "the model, a part for each rank"
    if ranks * host.held_bytes >= fullest:
        return "between steps", "what is offloaded"
    beside = ", beside what is offloaded" if host.held_bytes else ""
    return "while saving", f"a checkpoint{beside}"


def deciding_text(answer: Estimate) -> str:
    """``load 87.0``, in GiB, where loading or saving decides the verdict; else nothing."""
    if answer.worst_bytes == answer.peak_bytes or answer.verdict is Verdict.FITS:
        return ""
    return f"{answer.deciding_phase} {answer.worst_bytes / GIB:,.1f}"


TOLD_BYTES = GIB // 200
"""Buffers of less are no row of an account: it would be zeros."""


def account_columns(estimate: Estimate, names: str = "") -> list[Column]:
    """Components down, phases across, each phase at its own peak; ``names``: of which GPUs."""
    phases = list(estimate.phases.values())
    most = {
        kind: max((phase.components.get(kind.label, 0) for phase in phases), default=0)
        for kind in ComponentKind
        if any(kind.label in phase.components for phase in phases)
    }
    kinds = [
        kind
        for kind, size in most.items()
        if kind is not ComponentKind.BUFFERS or size >= TOLD_BYTES
    ]
    labels = [kind.label.replace("_", " ") for kind in kinds]
    styles = ("",) * len(kinds) + ("bold",)
    columns = [
        Column(
            header=(f"GiB, {names}" if names else "GiB",), cells=(*labels, "peak"), styles=styles
        )
    ]
    for phase in phases:
        sizes = [phase.components.get(kind.label, 0) for kind in kinds]
        mark = " *" if phase.name == estimate.deciding_phase else ""
        columns.append(
            Column(
                header=(phase.name + mark,),
                cells=(
                    *(plain_gib(size) if size else "" for size in sizes),
                    plain_gib(phase.peak_bytes),
                ),
                styles=styles,
                is_figure=True,
            )
        )
    return columns


SHORT_LEGEND = ("GiB = 2^30 bytes; --legend: every word; --assumptions: every default",)
SHORT_ACCOUNT_LEGEND = (
    "* decides; GiB = 2^30 bytes; --legend: every word; --assumptions: every default",
)


def footnotes(rows: Rows) -> list[str]:
    """What the reader of a report has to know, each line once."""
    return [*meaning_lines(), *precision_lines(rows), *notes(rows)]


def meaning_lines() -> list[str]:
    """What the words of the answer mean, where there is no ``--legend`` to ask for."""
    from memplan.report.legend import ANSWER_WORDS

    return [
        f"GiB = {ANSWER_WORDS['GiB']}. needs: {ANSWER_WORDS['needs']}.",
        (
            f"fits: {ANSWER_WORDS['fits']}; tight: {ANSWER_WORDS['tight']}; does not fit, OOM: "
            f"{ANSWER_WORDS['OOM, does not fit']}; states fit: {ANSWER_WORDS['states fit']}."
        ),
    ]


def _print_words(
    console: "Console", short: Sequence[str], *, legend: bool, zero_init: bool = False
) -> None:
    """Print what the words mean: a line, or all of them."""
    if not legend:
        for text in short:
            print_dim(console, text)
        return
    from memplan.report.legend import print_legend

    print_legend(console)
    if zero_init:
        print_dim(console, ZERO_INIT_LINE)


ZERO_INIT_LINE = (
    "ZeRO-3 loads under zero.Init, as transformers does; for a loop of your own without it: "
    "--engine-option zero_init=false"
)


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
