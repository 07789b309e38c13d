"""A prediction beside a run that took place, part by part, for people and for scripts."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict
from memplan.estimator.measured import Figure, Measurement, beside_bytes, figures_of
from memplan.fast_dataclass import dataclass
from memplan.memory.runtime import ByteRange, overhead_range
from memplan.report.estimates.changes import gpus_label, setup_label
from memplan.report.estimates.times import seconds_text
from memplan.report.rows.written import Row
from memplan.report.terminal.blocks import hanging
from memplan.report.terminal.narrow import print_table
from memplan.units import GIB, MIB

if TYPE_CHECKING:
    from rich.table import Table

    from memplan.estimator.time.step_time import StepTime
    from memplan.report.terminal.console import Console

VERIFY_SCHEMA_VERSION = 1
"""Raised when a key of a row changes its name or its meaning."""
DIED = "out of memory"
CROWD_BYTES = 1 * GIB
"""Beyond the range of context and NCCL, from which on another process is taken to be on the card."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A measurement, and what is predicted of the same run."""

    measured: Measurement
    estimate: Estimate
    source: str = ""
    """The file that it was read from; empty: it was made just now."""

    @cached_property
    def figures(self) -> list[Figure]:
        """Every number that both have; the run is played out for them once."""
        return figures_of(self.estimate, self.measured)

    @property
    def peak_errors(self) -> list[float]:
        """Of each part of a step: allocated, or asked for where nothing was allocated."""
        what = "asked for" if self.measured.is_fake else "allocated"
        steps = ("forward", "backward", "step")
        return [each.error for each in self.figures if each.part in steps and each.what == what]

    @property
    def time(self) -> "StepTime | None":
        """What is predicted of a step's time; None: none was measured, or its collectives carried nothing."""
        if self.measured.step_s is None or self.measured.is_alone:
            return None
        from memplan.estimator.time.step_time import step_time

        return step_time(self.estimate)

    @property
    def verdict(self) -> Verdict | None:
        """What was predicted for this card."""
        return self.estimate.verdict

    @property
    def is_crowded(self) -> bool:
        """Whether more of the card is taken than this process can explain."""
        beside = self.measured.context_bytes or 0
        return beside > self.beside_bytes.high + CROWD_BYTES

    @property
    def beside_bytes(self) -> ByteRange:
        """What is predicted to lie beside the allocator's segments."""
        return beside_bytes(self.estimate, self.measured)

    @property
    def needed_bytes(self) -> ByteRange:
        """What the driver may count: from the least that the run completes with to what it reserves with room."""
        beside = self.beside_bytes
        return ByteRange(
            self.estimate.required_bytes + beside.low, self.estimate.reserved_bytes + beside.high
        )

    @property
    def is_agreed(self) -> bool:
        """Whether it ended as the verdict said; *tight*, and a crowded card, agree with either way."""
        if self.measured.is_fake or self.verdict is Verdict.TIGHT or self.is_crowded:
            return True
        return (self.measured.death is not None) == (self.verdict is Verdict.OOM)


def verify_rows(runs: Sequence[Verified]) -> list[Row]:
    """A row for each figure of each run."""
    rows: list[Row] = []
    for run in runs:
        measured, about = run.measured, _run_columns(run)
        rows += [
            {
                **about, "part": each.part or None, "what": each.what,
                "predicted": each.predicted, "predicted_high": each.predicted,
                "measured": each.measured, "error": each.error,
            }
            for each in run.figures
        ]  # fmt: skip
        overhead, needed = run.beside_bytes, run.needed_bytes
        for what, low, high, real in (
            ("context", overhead.low, overhead.high, measured.context_bytes),
            ("needed", needed.low, needed.high, measured.driver_bytes),
        ):
            if real is not None:
                rows.append({
                    **about, "part": None, "what": what, "predicted": low, "predicted_high": high,
                    "measured": real, "error": None,
                })  # fmt: skip
        time, real_s = run.time, measured.step_s
        if time is not None and real_s is not None:
            rows.append({
                **about, "part": None, "what": "step_s", "predicted": time.expected_s,
                "predicted_high": time.high_s, "measured": real_s, "error": time.expected_s / real_s - 1,
            })  # fmt: skip
    return rows


def _run_columns(run: Verified) -> Row:
    """What every row of a run begins with."""
    measured = run.measured
    return {
        "source": run.source or None,
        "model": measured.model_name,
        "gpu": measured.gpu,
        "is_fake": measured.is_fake,
        "num_gpus": measured.setup.num_gpus,
        "num_nodes": measured.setup.nodes,
        "engine": measured.setup.chosen_engine.value,
        "num_steps": measured.num_steps,
        "torch": measured.versions.get("torch"),
        "verdict": run.verdict.value if run.verdict is not None else None,
        "ended": f"{DIED} in {measured.death.part}" if measured.death else "completed",
    }


def print_verified(console: "Console", run: Verified) -> None:
    """Print one run: a table of its parts, and what lies beside them."""
    from rich.text import Text

    measured, setup = run.measured, run.estimate.setup
    sizes = (
        f"batch {setup.micro_batch_size} x {setup.seq_len:,} tokens, {setup.chosen_precision.value}"
    )
    where = setup_label(setup)
    if setup.num_gpus > 1:
        where = f"{gpus_label(setup)}, {where}"
    head = f" on {where}, {sizes}"
    if answer := peak_words(run):
        console.print(Text(answer))
    console.print(Text.assemble((measured.model_name, "bold"), head))
    for line in _about(run):
        console.print(Text(line, style="dim"))
    if measured.death is None:
        console.print()
        print_table(console, _table(run))
    for line in verified_lines(run):
        for each in hanging(line, console.width):
            console.print(Text(each), soft_wrap=True)


def peak_words(run: Verified) -> str:
    """The fullest part of a step, as predicted and as measured; empty where nothing was."""
    what = "asked for" if run.measured.is_fake else "allocated"
    found = [each for each in run.figures if each.what == what and each.part in STEP_PARTS]
    if not found:
        return ""
    peak = max(found, key=lambda each: each.measured)
    return (
        f"peak predicted {peak.predicted / GIB:,.3f} GiB, measured {peak.measured / GIB:,.3f} GiB "
        f"({peak.error:+.3%}), in {peak.part}"
    )


STEP_PARTS = ("forward", "backward", "step")


def _about(run: Verified) -> list[str]:
    measured = run.measured
    versions = ", ".join(f"{name} {text}" for name, text in measured.versions.items() if text)
    steps = f"{measured.num_steps} steps"
    if measured.is_fake:
        card = run.estimate.gpu.short_name if run.estimate.gpu is not None else measured.gpu
        lines = [f"no GPU: followed on fake tensors, storage by storage, as on {card}; {steps}"]
    else:
        lines = [f"measured on {measured.gpu}, {measured.gpu_memory_bytes // MIB} MiB; {steps}"]
    if measured.is_alone:
        lines.append(
            f"one rank of {run.estimate.setup.num_gpus}: its collectives carried nothing, and held what "
            "they hold"
        )
    lines.append(versions)
    if run.source:
        lines.insert(0, run.source)
    return lines


def _table(run: Verified) -> "Table":
    from rich import box
    from rich.table import Table

    is_fake = run.measured.is_fake
    kinds = ["asked for"] if is_fake else ["allocated", "reserved"]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("asked for, GiB" if is_fake else "GiB")
    for kind in kinds:
        heads = ("predicted", "followed", "error") if is_fake else (kind, "measured", "error")
        for word in heads:
            table.add_column(word, justify="right", no_wrap=True)
    figures = {(each.part, each.what): each for each in run.figures}
    parts = dict.fromkeys(each.part for each in run.figures if each.part)
    for part in parts:
        cells = []
        for kind in kinds:
            usual = figures.get((part, kind))
            # What is held between steps is counted as it was asked for.
            each = usual or (figures.get((part, "asked for")) if kind == kinds[0] else None)
            cells += ["", "", ""] if each is None else _cells(each)
        table.add_row(part, *cells)
    return table


def _cells(figure: Figure) -> list[str]:
    return [
        f"{figure.predicted / GIB:.3f}", f"{figure.measured / GIB:.3f}", f"{100 * figure.error:+.3f} %",
    ]  # fmt: skip


def verified_lines(run: Verified) -> list[str]:
    """What is said below the table."""
    measured = run.measured
    lines = [*_parameter_lines(run), *_card_lines(run)]
    time, real_s = run.time, measured.step_s
    if time is not None and real_s is not None:
        lines.append(
            f"a step: {seconds_text(time.expected_s)} predicted ({seconds_text(time.low_s)} to "
            f"{seconds_text(time.high_s)}), {seconds_text(real_s)} measured"
        )
    if not measured.is_fake:
        lines.append(_outcome(run))
    return lines


def _parameter_lines(run: Verified) -> list[str]:
    measured, params = run.measured, run.figures[0]
    if measured.num_params and params.predicted != params.measured:
        return [f"parameters: {params.predicted:,} predicted, {params.measured:,} in the model"]
    return [f"parameters: {params.measured:,}, as predicted"] if measured.num_params else []


def _card_lines(run: Verified) -> list[str]:
    """What lies beside the allocator's bytes, and whose it is."""
    measured = run.measured
    lines = []
    if measured.context_bytes is not None:
        overhead = run.beside_bytes
        has_nccl = (
            overhead.high > overhead_range(measured.compute_capability, num_communicators=0).high
        )
        lines.append(
            f"beside the allocator (context{', NCCL' if has_nccl else ''}): "
            f"{_range(overhead.low, overhead.high)} predicted, {_gib(measured.context_bytes)} measured"
        )
    if run.is_crowded:
        lines.append("more of the card is taken than this process explains: another one holds it")
    elif measured.driver_bytes is not None:
        needed = run.needed_bytes
        lines.append(
            f"taken in all: {_range(needed.low, needed.high)} predicted, from the least to what is reserved "
            f"where there is room; the driver counted {_gib(measured.driver_bytes)}"
        )
    if measured.others_bytes:
        lines.append(
            f"others held {_gib(measured.others_bytes)} of the card, which the verdict leaves out"
        )
    if measured.num_retries:
        lines.append(
            f"the allocator gave its cache back {measured.num_retries} times for want of memory"
        )
    return lines


def _outcome(run: Verified) -> str:
    said = f"memplan says {run.verdict.value}" if run.verdict is not None else "no verdict"
    agreed = "as it was" if run.is_agreed else "WHICH IS WRONG: please report it"
    death = run.measured.death
    if death is None:
        return f"it completed; {said}{'' if run.is_agreed else f', {agreed}'}"
    where = f"{DIED} in {death.part}: {death.message}"
    return f"{where}; {said}{'' if run.is_agreed else f', {agreed}'}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _range(low: int, high: int) -> str:
    return f"{low / GIB:.2f} to {high / GIB:.2f} GiB"


def summary_line(runs: Sequence[Verified]) -> str:
    """Of several runs: how far off, at the middle and at worst, and whether verdicts held.

    >>> summary_line([])
    '0 runs'
    """
    errors = sorted(abs(error) for run in runs for error in run.peak_errors)
    text = f"{len(runs)} runs"
    if errors:
        middle = errors[len(errors) // 2]
        text += (
            f": peaks off by {100 * middle:.3f} % at the median, {100 * errors[-1]:.3f} % at worst"
        )
    wrong = sum(not run.is_agreed for run in runs)
    real = sum(not run.measured.is_fake for run in runs)
    if real:
        text += f"; {real - wrong} of {real} verdicts held"
    return text
