"""Verdicts beside what became of the runs: counts for the accuracy page, and every wrong one by itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memplan.estimator import Estimate, Verdict
from memplan.search.admission import kind_of
from tests.accuracy.comparison import remember, remember_outcomes, remember_wrong
from tests.measured.outcomes import words_of

RAN, DIED = "ran", "died"
ENDS = (RAN, DIED)
WRONG = ((Verdict.FITS, DIED), (Verdict.OOM, RAN))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run: what was said of it, and how it ended."""

    id: str
    source: str
    gpu: str
    verdict: Verdict
    died: bool
    kind: str
    """Of job, as ``memplan.search.admission.kind_of`` names it."""
    words: str = ""
    needed: tuple[int, int, int] = (0, 0, 0)
    """Of a wrong one: what it was said to need at least and at most, and what the card has [bytes]."""

    @property
    def end(self) -> str:
        return DIED if self.died else RAN

    @property
    def is_wrong(self) -> bool:
        return (self.verdict, self.end) in WRONG


def judged(
    answer: Estimate, verdict: Verdict | None, *, record: str, source: str, gpu: str, died: bool
) -> Judged:
    """What was said; the needs of a run are looked for only where that was wrong."""
    assert verdict is not None
    assert answer.gpu is not None
    kind = kind_of(answer.setup)
    found = Judged(id=record, source=source, gpu=gpu, verdict=verdict, died=died, kind=kind)
    if not found.is_wrong:
        return found
    needed = answer.total_bytes
    return Judged(
        id=record, source=source, gpu=gpu, verdict=verdict, died=died, kind=kind,
        words=words_of(answer.model.name, answer.setup),
        needed=(needed.low, needed.high, answer.gpu.capacity_bytes),
    )  # fmt: skip


def counted(runs: Iterable[Judged]) -> dict[str, dict[str, Any]]:
    """How runs ended, by what was said of them."""
    counts = Counter((run.verdict, run.end) for run in runs)
    return {
        verdict.value: {end: counts[verdict, end] for end in ENDS}
        for verdict in Verdict
        if any(counts[verdict, end] for end in ENDS)
    }


def remember_verdicts(
    collection: str, runs: Iterable[Judged], guesses: dict[str, str], *, update: bool
) -> None:
    """Check what the accuracy page shows of a collection, or rewrite it. Each wrong one has a guess why."""
    each_run = list(runs)
    rows = counted(each_run)
    by_kind = {
        kind: counted([run for run in each_run if run.kind == kind])
        for kind in sorted({run.kind for run in each_run})
    }
    wrong = sorted((run for run in each_run if run.is_wrong), key=lambda run: run.id)
    remember(f"verdicts, {collection}", rows, update=update)
    remember_outcomes(collection, by_kind, update=update)
    remember_wrong(
        collection,
        [
            {
                "id": run.id, "source": run.source, "gpu": run.gpu, "run": run.words,
                "verdict": run.verdict.value, "ended": run.end, "low_bytes": run.needed[0],
                "high_bytes": run.needed[1], "capacity_bytes": run.needed[2],
                "why": guesses.get(run.id, "nobody has looked into it yet"),
            }
            for run in wrong
        ],
        update=update,
    )  # fmt: skip
