"""Step times, throughput, whole runs: as lines, as columns, as keys of a row."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.errors import UnsupportedOperationError
from memplan.estimator.job_request import checkpoint_bytes
from memplan.estimator.time.goodput import Goodput, goodput
from memplan.estimator.time.run_cost import RunCost, TimeQuestion, run_cost
from memplan.estimator.time.step_time import StepTime, step_time
from memplan.fast_dataclass import dataclass, replace
from memplan.report.terminal.blocks import Column

if TYPE_CHECKING:
    from memplan.estimator import Estimate

TIME_MEANINGS: Mapping[str, str] = {
    "step_s": "expected time of an optimizer step [s]; null where operations are not written down",
    "step_low_s": "the same, low end",
    "step_high_s": "the same, high end",
    "tokens_per_s": "of all GPUs",
    "tokens_per_s_per_gpu": "of one of them",
    "model_tflops_per_gpu": "model FLOPs (all scores counted) per second and GPU [10^12 FLOP/s]",
    "mfu": "that over the data sheet's dense 16-bit rate",
    "hfu": "the same with recomputation",
    "bound_by": "what most of the step is spent on",
}
"""What rows have besides where times are asked for."""
RUN_MEANINGS: Mapping[str, str] = {
    "run_days": "expected length of the whole run",
    "run_low_days": "the same, low end",
    "run_high_days": "the same, high end",
    "gpu_hours": "of all GPUs",
    "energy_kwh": "the cards' own at their limit of power; null where that is not known",
    "cost": "GPU-hours times the price of one; null without a price",
    "goodput": "share of a run's days that steps take which last, with published rates of failures (or the one that is given) and the best interval between checkpoints",
    "checkpoint_every_s": "that interval, or the one that is asked for [s]",
    "days_with_failures": "expected length of the whole run with failures, checkpoints and evaluations",
    "saving_share": "what checkpoints take of these days",
    "evaluation_share": "what evaluations take of them",
}
"""And where the length of a run is."""


def time_keys(question: TimeQuestion) -> tuple[str, ...]:
    """The keys that a question adds to a row."""
    return (*TIME_MEANINGS, *(RUN_MEANINGS if question.has_length else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A setup with its time."""

    time: StepTime | None
    """None: it is not known."""
    run: RunCost | None
    why: str = ""
    """It is not known."""
    goodput: Goodput | None = None
    """Of the run."""


def timed(answer: "Estimate", question: TimeQuestion) -> Timed:
    """The time of an answer's step, and of the run that is asked for."""
    try:
        time = step_time(answer, site=question.site)
    except UnsupportedOperationError as error:
        return Timed(time=None, run=None, why=str(error))
    if question.mfu is not None:
        time = time.with_mfu(question.mfu)
    setup = answer.setup
    sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
    run = run_cost(time, question, answer.gpu, sequences=sequences)
    kept = None if run is None else _goodput(answer, question, time)
    return Timed(time=time, run=run, goodput=kept)


def _goodput(answer: "Estimate", question: TimeQuestion, time: StepTime) -> Goodput:
    setup, asked, evaluating = answer.setup, question.evaluations, 0.0
    if asked is not None:
        from memplan.estimator.time.evaluating import (
            evaluation_seconds,  # only where it is asked for
        )

        taken_s = evaluation_seconds(answer, asked, question.site)
        evaluating = taken_s / (asked.every_steps * time.expected_s)
    return goodput(
        setup.num_gpus,
        setup.nodes,
        checkpoint_bytes(answer),
        save_every_s=question.save_every_s,
        evaluating=evaluating,
        per_gpu_day=question.failures_per_gpu_day,
    )


def time_row(answer: "Estimate", question: TimeQuestion) -> dict[str, object]:
    """A row's keys: ``TIME_MEANINGS``, and ``RUN_MEANINGS`` where a run's length is given."""
    found = timed(answer, question)
    time, run = found.time, found.run
    row: dict[str, object] = dict.fromkeys(TIME_MEANINGS)
    if time is not None:
        told = (
            _short(time.expected_s), _short(time.low_s), _short(time.high_s), round(time.tokens_per_s),
            round(time.tokens_per_s_per_gpu), round(time.flops_per_s_per_gpu / 1e12, 1),
            round(time.mfu, 4), round(time.hfu, 4), time.binding,
        )  # fmt: skip
        row = dict(zip(TIME_MEANINGS, told, strict=True))
    if question.has_length:
        row |= dict.fromkeys(RUN_MEANINGS)
    if run is not None:
        scale = run.days / run.expected_s
        energy, cost = run.energy_kwh, run.cost
        values: tuple[float | None, ...] = (
            _short(run.days), _short(run.low_s * scale), _short(run.high_s * scale),
            _short(run.gpu_hours), None if energy is None else _short(energy),
            None if cost is None else round(cost, 2),
        )  # fmt: skip
        kept = found.goodput
        if kept is not None:
            values += (
                round(kept.share, 4), _short(kept.save_every_s), _short(run.days / kept.share),
                round(kept.saving_share, 6), round(kept.evaluating_share, 6),
            )  # fmt: skip
        row |= dict(zip(RUN_MEANINGS, values, strict=True))
    return row


def _short(value: float) -> float:
    """Five digits: no more is known."""
    return float(f"{value:.5g}")


def hours_text(hours: float) -> str:
    """Whole ones, where there are many.

    >>> hours_text(4.5312), hours_text(244_123)
    ('4.53', '244,123')
    """
    return _digits(hours) if hours < 100 else f"{hours:,.0f}"


RUN_TOKENS, SOME_TOKENS = 10**9, "1B tokens"
"""Of which GPU-hours are told where no run's length is given."""


def gpu_hours(time: StepTime) -> float:
    """All GPUs' hours for ``RUN_TOKENS``."""
    return RUN_TOKENS / time.tokens_per_s_per_gpu / 3600


def money_text(cost: float) -> str:
    """Cents where there is little of it.

    >>> money_text(11.349), money_text(597_990)
    ('11.35', '597,990')
    """
    return f"{cost:,.2f}" if cost < 100 else f"{cost:,.0f}"


def seconds_text(seconds: float) -> str:
    """Three digits, in the unit at hand.

    >>> seconds_text(0.01234), seconds_text(1.8), seconds_text(754)
    ('12.3 ms', '1.80 s', '754 s')
    """
    if seconds < 1:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def days_text(seconds: float) -> str:
    """Days; hours below two of them, and minutes below one.

    >>> days_text(86400 * 12.3), days_text(5400), days_text(2040)
    ('12.3 days', '1.50 hours', '34.0 minutes')
    """
    if seconds < 3600:
        return f"{_digits(seconds / 60)} minutes"
    days = seconds / 86_400
    return f"{_digits(days)} days" if days >= 2 else f"{_digits(seconds / 3600)} hours"


def time_lines(answer: "Estimate", question: TimeQuestion) -> list[str]:
    """What a step takes on one GPU's card, why, and a whole run with failures; for people."""
    found = timed(answer, question)
    time = found.time
    if time is None:
        return [f"Time on {_card_name(answer)}: not known: {found.why}"]
    lines = [_step_text(answer, time)]
    parts = [
        f"{each.words} {each.seconds / time.expected_s:.0%}"
        for each in time.shares[:SHOWN_SHARES]
        if each.seconds / time.expected_s >= LEAST_SHARE
    ]
    if parts and question.mfu is None:
        lines.append(f"  of it {', '.join(parts)}")
    lines += [f"  {note}" for note in time.notes]
    if found.run is not None and found.goodput is not None:
        lines.append(f"  {goodput_text(found.run, found.goodput)}")
    return lines


def speed_lines(answer: "Estimate") -> list[str]:
    """What a step takes, for somebody who asked for bytes: one line, and none where it is not known."""
    time = timed(answer, TimeQuestion()).time
    return [] if time is None or answer.gpu is None else [_step_text(answer, time)]


def time_factor(before: "Estimate", after: "Estimate") -> float | None:
    """How many times as long a token takes after a change; None where it is not known."""
    question = TimeQuestion()
    old, new = timed(before, question).time, timed(after, question).time
    return None if old is None or new is None else old.tokens_per_s / new.tokens_per_s


def factor_text(factor: float) -> str:
    """In words.

    >>> factor_text(1.312), factor_text(0.5), factor_text(1.004)
    ('a token then takes 1.31 times as long', 'tokens then come 2.00 times as fast', 'no slower')
    """
    if factor >= 1 + LEAST_SHARE:
        return f"a token then takes {_digits(factor)} times as long"
    if factor <= 1 - LEAST_SHARE:
        return f"tokens then come {_digits(1 / factor)} times as fast"
    return "no slower"


def _step_text(answer: "Estimate", time: StepTime) -> str:
    span = f" ({_span(time.low_s, time.high_s)})" if time.low_s < time.high_s else ""
    return (
        f"Step on {_card_name(answer)}: {seconds_text(time.expected_s)}{span}, "
        f"{_rate_text(answer, time)}"
        f"; {time.flops_per_s_per_gpu / 1e12:,.0f} TFLOP/s, {_utilisation(time)}"
    )


def _rate_text(answer: "Estimate", time: StepTime) -> str:
    """Of a model without a stack of text layers people count pictures, recordings and clips, not tokens."""
    setup, model = answer.setup, answer.model
    of_text = bool(model.stacks) or model.traced is not None
    samples = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel
    rate = time.tokens_per_s if of_text else samples / time.expected_s
    what, digits = ("tokens", ",.0f") if of_text else ("samples", ",.3g" if rate < 1000 else ",.0f")
    each = f"{rate / time.num_gpus:{digits}} {what}/s per GPU"
    return each + (f", {rate:{digits}} in all" if time.num_gpus > 1 else "")


def _utilisation(time: StepTime) -> str:
    if time.executed_flops > time.model_flops:
        return f"MFU {time.mfu:.0%}, HFU {time.hfu:.0%}"
    return f"MFU and HFU {time.mfu:.0%}"


def _card_name(answer: "Estimate") -> str:
    return answer.gpu.short_name if answer.gpu is not None else "A100-80"


SHOWN_SHARES = 4
LEAST_SHARE = 0.02


def _span(low: float, high: float) -> str:
    first, second = seconds_text(low), seconds_text(high)
    unit = second.rpartition(" ")[2]
    return f"{first.removesuffix(' ' + unit)}-{second}"


def _days_span(low_s: float, high_s: float) -> str:
    """``10.7 to 22.9 hours``: the unit once, where it is one."""
    low, high = days_text(low_s), days_text(high_s)
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def run_text(run: RunCost, question: TimeQuestion) -> str:
    """``1T tokens: 159 days (143-185), 244,000 GPU-hours, 171 MWh, 611,000``."""
    asked = (
        f"{count_text(question.tokens)} tokens"
        if question.tokens is not None
        else f"{count_text(question.examples or 0)} examples"
    )
    if question.epochs != 1:
        asked += f" x {question.epochs:g}"
    span = f" ({_days_span(run.low_s, run.high_s)})" if run.low_s < run.high_s else ""
    parts = [
        f"{asked}: {days_text(run.expected_s)}{span}, {run.num_steps:,.0f} steps",
        f"{hours_text(run.gpu_hours)} GPU-hours",
    ]
    if run.energy_kwh is not None:
        energy = run.energy_kwh
        parts.append(f"{energy / 1000:,.0f} MWh" if energy >= 10_000 else f"{energy:,.0f} kWh")
    if run.cost is not None:
        parts.append(f"cost {money_text(run.cost)}")
    return ", ".join(parts)


def goodput_text(run: RunCost, kept: Goodput) -> str:
    """``with failures: 164 days (160 to 170), one each 11.2 hours; a checkpoint each 34 minutes, of 25.0 s``."""
    low, high = (run.expected_s / share for share in (kept.high_share, kept.low_share))
    return (
        f"with failures: {days_text(run.expected_s / kept.share)} ({_days_span(low, high)}), one each "
        f"{days_text(kept.failure_every_s)}; {_saving_text(kept)}"
        + (
            f"; evaluation takes {_percent(kept.evaluating_share)} of it"
            if kept.evaluating_share
            else ""
        )
    )


def _saving_text(kept: Goodput) -> str:
    best = f"a checkpoint each {_digits(kept.best_every_s / 60)} minutes"
    taken = f"of {seconds_text(kept.save_s)}, {_percent(kept.saving_share)} of it"
    if kept.save_every_s == kept.best_every_s:
        return f"best {best}, {taken}"
    return f"a checkpoint each {_digits(kept.save_every_s / 60)} minutes, {taken}; best {best}"


def _percent(share: float) -> str:
    """Two digits: ``0.31 %``."""
    return f"{100 * share:.2g} %"


def changed_text(run: RunCost, other: RunCost) -> str:
    """What one number of GPUs changes beside another, for the same run.

    >>> few = RunCost(num_steps=1, low_s=9e6, expected_s=9e6, high_s=9e6, num_gpus=64, watts=700, price=2.5)
    >>> many = RunCost(num_steps=1, low_s=5e6, expected_s=5e6, high_s=5e6, num_gpus=128, watts=700, price=2.5)
    >>> changed_text(many, few)
    '128 in place of 64 GPUs: 46.3 days sooner (1.80 times as fast), 11 % more GPU-hours, cost +44,444'
    """
    sooner, faster = other.expected_s - run.expected_s, other.expected_s / run.expected_s
    when = f"{days_text(abs(sooner))} {'sooner' if sooner >= 0 else 'later'}"
    more = round(100 * (run.gpu_hours / other.gpu_hours - 1))
    hours = f"{abs(more)} % {'more' if more > 0 else 'fewer'}" if more else "as many"
    text = (
        f"{run.num_gpus} in place of {other.num_gpus} GPUs: {when} ({_digits(faster)} times as fast), "
        f"{hours} GPU-hours"
    )
    if run.cost is not None and other.cost is not None:
        text += f", cost {run.cost - other.cost:+,.0f}"
    return text


def count_text(count: int) -> str:
    """A round number in words.

    >>> count_text(10**12), count_text(15_600_000_000), count_text(52_000)
    ('1T', '15.6B', '52K')
    """
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:g}{letter}"
    return str(count)


def time_columns(answers: "Sequence[Estimate]", question: TimeQuestion) -> list[Column]:
    """A step's time, tokens and FLOPs per second, utilisation; days and cost where they are asked for."""
    found = [timed(each, question) for each in answers]
    times = [each.time for each in found]
    is_spread = any(each.setup.num_gpus > 1 for each in answers)
    columns = [
        _column(header, [None if each is None else words(each) for each in times])
        for header, words in _STEP_COLUMNS.items()
        if header != IN_ALL or is_spread
    ]
    if not is_spread:  # then one GPU's rate is the only one, and stays
        columns = [
            replace(each, gives_way=0) if each.header == ONE_GPUS else each for each in columns
        ]
    runs = [each.run for each in found]
    if question.has_length:
        columns += _run_columns(runs)
    return columns


def _run_columns(runs: "Sequence[RunCost | None]") -> list[Column]:
    """A whole run in days, or in hours where all are short; what it takes of GPUs and of money."""
    longest = max((each.days for each in runs if each is not None), default=0.0)
    unit, size = ("days", 1.0) if longest >= 2 else ("hours", 1 / 24)
    columns = [
        _column(("run", unit), [None if each is None else _digits(each.days / size) for each in runs]),
        _column(("GPU-", "hours"), [None if each is None else hours_text(each.gpu_hours) for each in runs]),
    ]  # fmt: skip
    costs = [each.cost if each is not None else None for each in runs]
    if any(cost is not None for cost in costs):
        columns.append(
            _column(("cost", ""), [None if cost is None else money_text(cost) for cost in costs])
        )
    return columns


ONE_GPUS, IN_ALL = ("tokens/s", "per GPU"), ("tokens/s", "in all")
_STEP_COLUMNS: Mapping[tuple[str, str], Callable[[StepTime], str]] = {
    ("step", "s"): lambda each: _digits(each.expected_s),
    ("tokens/s", "per GPU"): lambda each: f"{each.tokens_per_s_per_gpu:,.0f}",
    ("tokens/s", "in all"): lambda each: f"{each.tokens_per_s:,.0f}",
    ("TFLOP/s", "per GPU"): lambda each: f"{each.flops_per_s_per_gpu / 1e12:,.0f}",
    ("MFU", "%"): lambda each: f"{each.mfu * 100:.0f}",
    ("HFU", "%"): lambda each: f"{each.hfu * 100:.0f}",
}
"""What tables tell of a step, by the lines of its header."""


def _column(header: tuple[str, ...], cells: "Sequence[str | None]") -> Column:
    return Column(
        header=header,
        cells=tuple(cell or "-" for cell in cells),
        is_figure=True,
        gives_way=_GIVE_WAY.get(header, 0),
    )


_GIVE_WAY: Mapping[tuple[str, ...], int] = {
    ("TFLOP/s", "per GPU"): 9,
    ("HFU", "%"): 8,
    ("tokens/s", "per GPU"): 7,
    ("MFU", "%"): 6,
    ("step", "s"): 1,
}
"""Columns that are left out where it is narrow, the highest first."""
