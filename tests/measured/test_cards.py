"""Training steps measured on one H100 and one H200, each beside memplan's estimate of the same run.

The cards had torch 2.11 where memplan follows 2.13, which shows in one place: a bias added by cuBLASLt keeps a
workspace of 1 MiB in each thread that does so, two with checkpointing.
"""

import sys
from dataclasses import dataclass
from functools import cache
from itertools import chain

import pytest

from memplan.compute.host import HOST_FACTORS, HostSpeed
from memplan.estimator import Verdict
from memplan.estimator.time.site import Site
from memplan.estimator.time.step_time import StepTime, step_time
from memplan.memory.runtime import ByteRange
from memplan.search.admission import kind_of
from memplan.units import MIB
from tests.accuracy.comparison import Comparison, remember
from tests.accuracy.verdicts import Judged, remember_verdicts
from tests.measured.card_runs import CARDS, CardRun, chain_seconds, read_file, read_runs

pytestmark = pytest.mark.long
on_each_card = pytest.mark.parametrize("card", CARDS)

UNTIED = "its tables were tied in no module: three or four of them, which no config says"
SHARDED_APART = (
    "the table was sharded as two parameters and tied afterwards, so it is gathered twice"
)
ADDRESSES = (
    "free blocks tie, and the lowest address is taken: the replay's segments lie upwards, "
    "this driver's did not; laid downwards it agrees"
)
NEWER = "the CUDA build of torch 2.13 reserves what memplan says; the card ran 2.11"
OUTSIDE: dict[str, str] = {
    "05fcf0ab52": ADDRESSES,
    "b280be1c3c": ADDRESSES,
    "faaf03c004": ADDRESSES,
    "2901d4395f": ADDRESSES,
    "589d6f541f": ADDRESSES,
    "328623a70a": NEWER,
    "a67ec2b863": "the class makes its mask in other steps",
}
"""Records whose reserved memory is off by more than ``CLOSE``: id -> what is known of why."""
OUTSIDE_ON_ONE = {
    "H100": {"68d7684462": ADDRESSES, "ebdacea64a": NEWER},
    "H200": {"a2cb24ca78": ADDRESSES},
}
"""The same for one card alone: the other's driver laid the segments of that run as the replay does."""
CLOSE = 0.03

BARS = {
    "before": (0.001, 0.02, 0.03),
    "after_forward": (0.001, 0.02, 0.03),
    "peak_forward": (0.0001, 0.002, 0.008),
    "peak_backward": (0.0001, 0.002, 0.008),
    "peak_step": (0.0002, 0.002, 0.01),
    "peak": (0.0001, 0.002, 0.008),
    "max_memory_allocated": (0.0001, 0.002, 0.008),
    "reserved": (0.0003, 0.03, 0.16),
}
"""Relative error of each figure: median, 95th percentile, worst. What is held is measured in whole blocks, and
memplan counts what was asked for; the worst peaks are of models so small that the workspaces above show."""
WORKSPACES_BYTES = 2 * MIB
TIME_MEDIAN, TIME_WITHIN, TIME_SHARE = 0.12, 0.30, 0.90
"""Of the steps' times. Nothing in memplan was fitted to these steps. Three in five wait for their host, a cloud
machine's, whose own steps differ: the second and the third, the same work, by 11 % in the median of those and 36 %
at the 90th percentile. The H200's launches in two thirds of the time of the H100's, which memplan cannot know and these
figures take from what was measured of it (``launch_chain``); the range from low to high is that of any host."""
TIME_INSIDE = 0.90
"""So many lie between the low and the high end."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What remains of a run once it is estimated."""

    run: CardRun
    predicted: dict[str, int]
    num_params: int
    verdict: Verdict | None
    kind: str
    """Of job."""
    beside: ByteRange
    apart: str
    """Why no setup says what was run; empty: one does."""
    time: StepTime
    """On a host as memplan takes for granted."""
    time_here: StepTime
    """On one as fast as the card's, which launches as fast as was measured."""

    @property
    def measured_s(self) -> float:
        """The mean of the second step and the third."""
        assert self.run.measured is not None
        steps = self.run.measured["seconds"][-2:]
        return float(sum(map(sum, steps)) / len(steps))

    @property
    def time_error(self) -> float:
        """Of the step's expected time."""
        return abs(self.time_here.expected_s / self.measured_s - 1)

    @property
    def flushed(self) -> bool:
        """The card hindered it: what it reserves with room is more."""
        return self.run.measured is not None and self.run.measured["retries"] > 0


def why_apart(run: CardRun) -> str:
    """What the script did to tied tables that no setup says."""
    if run.is_sharded:
        return SHARDED_APART if run.is_tied else ""
    return UNTIED if run.config["model_type"] in ("t5", "mt5") else ""


@cache
def site_of(card: str) -> Site:
    """The card's own host."""
    slow = HOST_FACTORS[HostSpeed.SLOW].expected
    return Site(host=slow * chain_seconds(card) / chain_seconds("H100"))


def row_of(run: CardRun) -> Row:
    answer, apart = run.answer, why_apart(run)
    predicted = run.predicted
    if run.measured is not None and not run.measured["retries"]:
        predicted["reserved"] = run.reserved_bytes
    row = Row(
        run=run,
        predicted=predicted,
        num_params=answer.num_params,
        verdict=answer.verdict,
        kind=kind_of(answer.setup),
        beside=answer.overhead_bytes,
        apart=apart,
        time=step_time(answer),
        time_here=step_time(answer, site=site_of(run.card)),
    )
    run.forget()
    return row


@cache
def rows_by_card() -> dict[str, tuple[Row, ...]]:
    """Runs that differ in the card alone follow each other: what is recorded of one is remembered for the next."""
    runs = {card: read_runs(card) for card in CARDS}
    alike = sorted(chain.from_iterable(runs.values()), key=CardRun.in_words)
    found = {(run.card, run.id): row_of(run) for run in alike}
    return {card: tuple(found[card, run.id] for run in of_card) for card, of_card in runs.items()}


def rows(card: str) -> tuple[Row, ...]:
    return rows_by_card()[card]


def completed(card: str) -> list[Row]:
    """Of runs that did not die, those that a setup says."""
    return [row for row in rows(card) if row.run.measured is not None and not row.apart]


def error_of(row: Row, name: str) -> float:
    truth = row.run.truth[name]
    return abs(row.predicted[name] - truth) / truth


def compare(card: str) -> Comparison:
    found = Comparison()
    for row in completed(card):
        kind = row.run.config["model_type"]
        record = {"id": row.run.id, "model_type": kind}
        found.add(record, row.run.truth, lambda _, row=row: row.predicted)
    return found


@on_each_card
def test_figures(
    card: str, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(card)
    with capsys.disabled():
        sys.stdout.write(f"\n{card}: {found.table()}\n")
    for name, (median, p95, worst) in BARS.items():
        assert found.quantile(name, 0.5) <= median, name
        assert found.quantile(name, 0.95) <= p95, name
        assert found.worst(name)[0] <= worst, found.worst(name)
    num_apart = sum(1 for row in rows(card) if row.apart and row.run.measured is not None)
    remember(
        f"{card}, measured",
        {name: found.row(name, num_apart=num_apart) for name in BARS if "peak_" not in name},
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("max_memory_allocated"),
        found=[found],
    )


def test_step_times(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """But for runs whose cache was flushed, which takes time too."""
    figures = {}
    for card in CARDS:
        ran = [row for row in rows(card) if row.run.measured is not None and not row.flushed]
        errors = sorted(row.time_error for row in ran)
        median = errors[len(errors) // 2]
        share = sum(error <= TIME_WITHIN for error in errors) / len(ran)
        inside = sum(row.time.low_s <= row.measured_s <= row.time.high_s for row in ran) / len(ran)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{card}, {len(ran)} step times: median {median:.1%}, {share:.0%} within "
                f"{TIME_WITHIN:.0%}, {inside:.0%} between low and high\n"
            )
        assert median <= TIME_MEDIAN
        assert share >= TIME_SHARE
        assert inside >= TIME_INSIDE
        figures[f"{card}, measured, transformers"] = {
            "records": len(errors), "of": len(errors), "median": round(median, 4),
            "p95": round(errors[int(0.95 * (len(errors) - 1))], 4), "worst": round(errors[-1], 4),
        }  # fmt: skip
    remember("step time", figures, update=pytestconfig.getoption("--update-accuracy"))


@on_each_card
def test_parameters(card: str) -> None:
    for row in completed(card):
        assert row.run.measured is not None
        assert row.num_params == row.run.measured["params"], row.run.id


@on_each_card
def test_every_peak(card: str) -> None:
    """But for the workspaces of torch 2.11, each phase's peak is met."""
    for row in completed(card):
        for name in ("peak_forward", "peak_backward", "peak_step"):
            missing = row.run.truth[name] - row.predicted[name]
            slack = 0.0002 * row.run.truth[name]
            assert -MIB - slack <= missing <= WORKSPACES_BYTES + MIB + slack, (row.run.id, name)


@on_each_card
def test_what_is_reserved(card: str) -> None:
    """Within 3 %, or named with what is known of why."""
    off = {
        row.run.id
        for row in completed(card)
        if "reserved" in row.predicted and error_of(row, "reserved") > CLOSE
    }
    named = OUTSIDE | OUTSIDE_ON_ONE[card]
    assert off == named.keys() & {row.run.id for row in completed(card)}


def is_right(row: Row) -> bool:
    """Whether the run was said to do what it did."""
    if row.run.measured is None:
        return row.verdict is Verdict.OOM
    return row.verdict in (Verdict.FITS, Verdict.TIGHT)


def test_verdicts(pytestconfig: pytest.Config) -> None:
    """Every run that died is said to die, and none that completed."""
    for card in CARDS:
        assert [row.run.id for row in rows(card) if not is_right(row)] == []
    ran = rows("H100")
    num_died = sum(row.run.measured is None for row in ran)
    assert num_died >= 30
    verdicts = {"runs": len(ran), "died": num_died, "right": sum(map(is_right, ran))}
    update = pytestconfig.getoption("--update-accuracy")
    remember("verdicts on the H100", {"all": verdicts}, update=update)
    for card in CARDS:
        runs = (
            Judged(
                id=row.run.id,
                source=card,
                gpu=card,
                verdict=row.verdict,
                died=row.run.measured is None,
                kind=row.kind,
            )
            for row in rows(card)
            if row.verdict is not None
        )
        remember_verdicts(f"{card}, measured for memplan", runs, {}, update=update)


def test_what_no_setup_says_is_off() -> None:
    """A reason that is not needed is none."""
    apart = [row for row in rows("H100") if row.apart and row.run.measured is not None]
    assert {row.apart for row in apart} == {UNTIED, SHARDED_APART}
    for row in apart:
        assert row.run.measured is not None
        assert row.predicted["peak"] < row.run.truth["peak"], row.run.id
        if row.apart is UNTIED:
            assert row.num_params < row.run.measured["params"], row.run.id


@on_each_card
def test_context(card: str) -> None:
    """What lay beside the segments is within the range that memplan has for it, NCCL aside."""
    alone = next(row.beside for row in rows(card) if not row.run.is_sharded)
    for row in rows(card):
        if row.run.measured is not None:
            assert alone.low <= row.run.measured["beside"] <= alone.high
    bare = read_file(card)["machine"]["context_mib"] * MIB
    assert alone.low <= bare <= alone.high


@pytest.mark.parametrize("capacity", read_file("H100")["capacities"], ids=lambda c: c["id"])
def test_least_capacity(capacity: dict[str, int]) -> None:
    """The card's memory was limited until three steps no longer completed."""
    run = next(run for run in read_runs("H100") if run.id == capacity["id"])
    required = run.answer.required_bytes
    assert capacity["dies"] * 0.99 <= required <= capacity["completes"] * 1.06
