"""Columns of tables in which a row is a setup: what it allocates, on the host, and on each GPU."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.fast_dataclass import dataclass
from memplan.report.estimates.answer import (
    VERDICT_STYLES,
    Rows,
    capacity_text,
    needed_text,
)
from memplan.report.estimates.changes import setup_label
from memplan.report.terminal.blocks import Column
from memplan.units import GIB

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupLine:
    """A setup, or a setup with one of its kernels."""

    number: int
    """Of the row."""
    label: str
    first: Estimate
    """The one that allocates most."""
    held: "Mapping[str, Estimate]"
    """By the GPU's id."""


def setup_lines(rows: Rows) -> Iterator[SetupLine]:
    """A line for each row, or for each of its kernels where they differ."""
    for number, row in enumerate(rows):
        groups = shown_groups(row)
        for group in groups:
            first = max(group, key=lambda each: each.peak_bytes)
            label = setup_label(first.setup)
            if len(groups) > 1:
                label += _apart(group, groups)
            held = {each.gpu.gpu_id: each for each in group if each.gpu is not None}
            yield SetupLine(number=number, label=label, first=first, held=held)


def allocated_column(lines: Sequence[SetupLine]) -> Column:
    """What PyTorch allocates where that decides, and in a step."""
    return Column(
        header=("allocated", "GiB"),
        cells=tuple(
            "\n".join(plain_gib(size) for _, size in peaks_of(line.first)) for line in lines
        ),
        is_figure=True,
        gives_way=1,
    )


def phase_column(lines: Sequence[SetupLine]) -> Column:
    """When that is."""
    return Column(
        header=("in", "phase"),
        cells=tuple("\n".join(name for name, _ in peaks_of(line.first)) for line in lines),
        gives_way=3,
    )


def size_columns(lines: Sequence[SetupLine]) -> list[Column]:
    """What each setup has the most of that fits, where setups differ in it."""
    sizes = (
        (("micro-", "batch"), [line.first.setup.micro_batch_size for line in lines]),
        (("tokens",), [line.first.setup.seq_len or 0 for line in lines]),
        (("LoRA", "rank"), [_rank(line.first) for line in lines]),
    )
    return [
        Column(header=header, cells=tuple(f"{size:,}" for size in found), is_figure=True)
        for header, found in sizes
        if len(set(found)) > 1
    ]


def _rank(answer: Estimate) -> int:
    return getattr(answer.setup.adapter, "rank", 0)


def reserved_column(lines: Sequence[SetupLine]) -> Column:
    """What the allocator reserves on a card with room."""
    sizes = (max(each.reserved_bytes for each in line.held.values()) for line in lines)
    return Column(header=("reserved", "GiB"), cells=tuple(map(plain_gib, sizes)), is_figure=True)


def card_column(
    gpu: "GpuSpec",
    lines: Sequence[SetupLine],
    *,
    largest: Mapping[tuple[int, str], int | None],
    with_needs: bool,
) -> Column:
    """The verdict on a GPU, and what is needed of it where that is told of every setup.

    ``largest``: with the largest micro-batch.
    """
    held = [line.held.get(gpu.gpu_id) for line in lines]
    verdict_width = max(len(each.verdict or "") for each in held if each is not None)
    needed = [needed_text(each.total_bytes) if each and with_needs else "" for each in held]
    width = max(map(len, needed))
    cells = []
    for line, each, text in zip(lines, held, needed, strict=True):
        cell = ""
        if each is not None and each.verdict is not None:
            cell = f"{each.verdict.value.ljust(verdict_width)} {text.rjust(width)}".rstrip()
            if size := largest.get((line.number, gpu.gpu_id)):
                cell += f" <= {size}"
        cells.append(cell)
    styles = tuple(
        VERDICT_STYLES[each.verdict] if each is not None and each.verdict is not None else ""
        for each in held
    )
    batch = ", batch" if largest else ""
    header = (gpu.short_name, f"of {capacity_text(gpu)}{batch}")
    return Column(header=header, cells=tuple(cells), styles=styles)


def peaks_of(answer: Estimate) -> list[tuple[str, int]]:
    """The phase that decides and what it allocates; a step's too, where that is another [bytes]."""
    found = [(answer.deciding_phase, answer.worst_bytes)]
    if answer.deciding_phase != answer.peak_phase:
        found.append((answer.peak_phase, answer.peak_bytes))
    return found


def host_column(answers: Sequence[Estimate]) -> Column:
    """CPU RAM of a node, and the verdict on it where it is known how much there is."""
    sizes = [f"{each.host_bytes / GIB:,.1f}" if each.host_bytes else "-" for each in answers]
    node = answers[0].node_memory_bytes
    if node is None:
        return Column(header=("CPU", "GiB"), cells=tuple(sizes), is_figure=True, gives_way=2)
    width = max(map(len, sizes))
    verdicts = [each.host_verdict or Verdict.FITS for each in answers]
    return Column(
        header=("CPU RAM", f"of {node / GIB:,.1f} GiB"),
        cells=tuple(
            f"{verdict.value:4} {size.rjust(width)}"
            for verdict, size in zip(verdicts, sizes, strict=True)
        ),
        styles=tuple(VERDICT_STYLES[verdict] for verdict in verdicts),
    )


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


def _apart(group: Sequence[Estimate], groups: Sequence[Sequence[Estimate]]) -> str:
    """What tells a group from the others of its setup: its GPU, or its kernel and its precision."""
    own, parts = group[0], []
    if all(len(each) == 1 for each in groups):
        return f", {short_names(group)}"
    others = [each for other in groups if other is not group for each in other]
    if any(each.attention_kernel != own.attention_kernel for each in others):
        parts.append(own.attention_kernel)
    if any(each.setup.chosen_precision is not own.setup.chosen_precision for each in others):
        parts.append(own.setup.chosen_precision.value.partition("-")[0])
    return "".join(f", {part}" for part in parts)


def short_names(estimates: Sequence[Estimate]) -> str:
    """``A100-80 and H100-80``."""
    return " and ".join(each.gpu.short_name for each in estimates if each.gpu is not None)


def plain_gib(num_bytes: int) -> str:
    """Two decimals, where the unit stands in the header."""
    return f"{num_bytes / GIB:,.2f}"
