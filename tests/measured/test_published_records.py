"""Published records, as their sources state them, against memplan's figures for the same runs.

Nothing here was inferred from a measured byte. Where memplan is off by more than ``CLOSE``, the record is named
in ``REASONS`` with what its run did that the setup does not say, found in that run's code. The records are those
of ``tests/data/published_memory.jsonl``, and of ``../shared/reference`` where that is there.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import Verdict
from tests.accuracy.comparison import read_records, remember, remember_published
from tests.accuracy.verdicts import judged, remember_verdicts
from tests.measured.outcomes import Outcome, Summary, summary_of, words_of
from tests.measured.reasons import REASONS, WRONG_VERDICTS
from tests.measured.runs import Record, record_from

CLOSE = 0.08
"""How far off an allocated figure may be without a reason."""
MOST_WRONGLY_DEAD = 0.005
"""Share of runs that only say that they ran and of which memplan says that they cannot: none of 216 and of 20."""


@dataclass(frozen=True)
class Bars:
    """What is reached; the aims are 0.8, 0.02 and 0.08. Six of the reference's 40 are LitGPT's of 2023 (``REASONS``)."""

    expressible: float
    median: float
    p90: float


BARS = {"own": Bars(0.85, 0.01, 0.04), "reference": Bars(0.8, 0.01, 0.12)}
SECTIONS = {"own": "published measurements, own file", "reference": "published measurements"}
"""Of ``tests/data/accuracy.json``."""
VERDICTS = {"own": "published, own file", "reference": "published, by machine"}
OWN = Path(__file__).parent.parent / "data" / "published_memory.jsonl"


@dataclass(frozen=True)
class Published:
    """One collection of records, every one in scope estimated."""

    name: str
    summary: Summary

    @property
    def bars(self) -> Bars:
        return BARS[self.name]


@pytest.fixture(params=["own", pytest.param("reference", marks=pytest.mark.reference)])
def published(request: pytest.FixtureRequest) -> Published:
    if request.param == "own":
        return Published("own", summary_of(map(record_from, read_records(OWN))))
    return Published("reference", summary_of(reference(request.getfixturevalue("reference_dir"))))


def reference(folder: Path) -> Iterator[Record]:
    for name in ("measured.jsonl", "measured_more.jsonl"):
        yield from read_records(folder / name)


@pytest.mark.long
def test_published_records(
    published: Published, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """All that is held against them, in one test: each process of a run would estimate them anew."""
    check_most_are_expressible(published, capsys)
    check_allocated(published)
    check_what_is_off_has_a_reason(published)
    check_what_ran_is_not_said_to_die(published)
    check_what_died_is_not_said_to_fit(published)
    check_the_readme_shows_them(published, pytestconfig)
    check_verdicts(published, pytestconfig)


def check_most_are_expressible(published: Published, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(table_of(published.summary))
    assert published.summary.share_expressible >= published.bars.expressible


def check_allocated(published: Published) -> None:
    allocated = published.summary.of("max_allocated")
    assert allocated.quantile(0.5) <= published.bars.median
    assert allocated.quantile(0.9) <= published.bars.p90


def check_what_is_off_has_a_reason(published: Published) -> None:
    """Each allocated figure that is off is named."""
    allocated = published.summary.of("max_allocated").expressible
    off = {each.record["id"] for each in allocated if abs(each.error) > CLOSE}
    assert off <= {each.record["id"] for each in allocated if reason_for(each)}


def check_what_ran_is_not_said_to_die(published: Published) -> None:
    ran = published.summary.of("fit").expressible
    wrong = [each.record["id"] for each in ran if is_verdict(each, Verdict.OOM)]
    assert len(wrong) <= MOST_WRONGLY_DEAD * len(ran), wrong


def check_what_died_is_not_said_to_fit(published: Published) -> None:
    died = published.summary.of("OOM").expressible
    assert not [each.record["id"] for each in died if is_verdict(each, Verdict.FITS)]


def check_verdicts(published: Published, pytestconfig: pytest.Config) -> None:
    """Each run once, however many of its figures were published."""
    runs = {}
    for each in published.summary.expressible:
        if each.answered is not None:
            runs.setdefault((id(each.answered), each.record["what"] == "OOM"), each)
    known = (
        judged(
            each.answer, each.answered.verdict, record=each.record["id"], source=each.record["source_url_or_repo_path"],
            gpu=each.run.gpu, died=died,
        )
        for (_, died), each in runs.items()
        if each.answer is not None and each.answered is not None and each.run is not None
    )  # fmt: skip
    update = pytestconfig.getoption("--update-accuracy")
    remember_verdicts(VERDICTS[published.name], known, WRONG_VERDICTS, update=update)


def check_the_readme_shows_them(published: Published, pytestconfig: pytest.Config) -> None:
    rows = {name: row(published.summary.of(name)) for name in ("max_allocated", "max_reserved")}
    rows["all"] = {
        "records": len(published.summary.outcomes),
        "expressible": len(published.summary.expressible),
        "unstated": sum(each.unstated for each in published.summary.outcomes),
    }
    section, update = SECTIONS[published.name], pytestconfig.getoption("--update-accuracy")
    remember(section, rows, update=update)
    shown = published.summary.of("max_allocated", "max_reserved").expressible
    remember_published(section, sorted(map(shown_row, shown), key=itemgetter("id")), update=update)


def is_verdict(outcome: Outcome, verdict: Verdict) -> bool:
    assert outcome.answered is not None
    return outcome.answered.verdict is verdict


def reason_for(outcome: Outcome) -> str | None:
    """What is known of why a record is off."""
    found = [why for pattern, why in REASONS if re.fullmatch(pattern, outcome.record["id"])]
    assert len(found) <= 1, outcome.record["id"]
    return found[0] if found else None


def shown_row(outcome: Outcome) -> dict[str, Any]:
    """One line of the accuracy page: what was run, what was measured, what memplan says."""
    record, answer, run = outcome.record, outcome.answer, outcome.run
    assert answer is not None
    assert run is not None
    found = {
        "id": record["id"],
        "source": str(record["source_url_or_repo_path"]),
        "gpu": run.gpu,
        "run": words_of(answer.model.name, answer.setup),
        "what": record["what"].removeprefix("max_"),
        "measured_bytes": outcome.measured_bytes,
        "predicted_bytes": outcome.predicted_bytes,
    }
    why = reason_for(outcome) or "; ".join(run.remarks)
    return found | ({"why": why} if why else {})


def row(part: Summary) -> dict[str, Any]:
    """What the README shows of one counter."""
    return {
        "records": len(part.outcomes),
        "expressible": len(part.expressible),
        "median": round(part.quantile(0.5), 4),
        "p90": round(part.quantile(0.9), 4),
    }


def table_of(summary: Summary) -> str:
    """Everything, for the test's output."""
    head = (
        f"\n{len(summary.expressible)} of {len(summary.outcomes)} published records are "
        f"expressible ({summary.share_expressible:.1%}; {summary.share_of_stated:.1%} of those whose "
        "sources say enough)"
    )
    lines = [head]
    for counter in ("max_allocated", "max_reserved", "nvidia-smi"):
        part = summary.of(counter)
        if not part.expressible:
            continue
        lines.append(
            f"{counter}: {len(part.expressible)} of {len(part.outcomes)}, median "
            f"{part.quantile(0.5):.2%}, p90 {part.quantile(0.9):.2%}"
        )
        lines += [
            f"  {each.record['id']:64s} {each.predicted_bytes:>14,d} {each.measured_bytes:>14,d} "
            f"{each.error:+8.2%}  {reason_for(each) or ''}"
            for each in part.expressible
        ]
    lines += [f"{count:4d} blocked by {what}" for what, count in summary.blocks.most_common()]
    return "\n".join(lines) + "\n"
