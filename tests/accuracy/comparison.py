"""How far estimates are from records, and what of that the README shows."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from memplan.errors import MemplanError
from memplan.units import MIB

FIGURES_FILE = Path(__file__).parent.parent / "data" / "accuracy.json"
"""The figures behind the README's table; ``make accuracy`` rewrites them."""

POINTS_FILE = FIGURES_FILE.with_name("accuracy_points.json")
"""Each record behind a peak of that table, for the accuracy page: section -> [true MiB, relative error]."""
PUBLISHED_FILE = FIGURES_FILE.with_name("accuracy_published.json")
"""Each published measurement beside memplan's figure, for the same page: collection -> rows."""

EVENTS_FILE = FIGURES_FILE.with_name("events_off.json")
"""Of each recorded step of a model that sees or hears, how many requests and ends stand elsewhere."""
OFF_FILE = FIGURES_FILE.with_name("bytes_off.json")
"""Of each figure of each set of records, how many are met to the byte and by how many bytes the others are missed
together. Bars have room in which a slip would pass; this has none: ``make accuracy`` rewrites it, and what moved is
seen."""

WRONG_FILE = FIGURES_FILE.with_name("accuracy_verdicts.json")
OUTCOMES_FILE = FIGURES_FILE.parents[2] / "memplan" / "data" / "outcomes.json"
"""How runs ended by what was said of them and by kind of job, which ``memplan admit`` tells: in the package."""
TIMES_FILE = FIGURES_FILE.with_name("published_times.json")
"""Each wrong verdict, for the same page: collection -> rows."""

Points = list[list[float]]
"""Of each record the true figure [MiB] and how far memplan is above it, as a share."""
Prediction = Callable[[dict[str, Any]], dict[str, int]]


@dataclass
class Comparison:
    """Relative errors of every figure over a set of records."""

    errors: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """For each figure, (absolute relative error, the record's id)."""
    compared: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """For each figure, what was measured and what was predicted [bytes]."""
    refused: dict[str, str] = field(default_factory=dict)
    """Record id -> why memplan refused it."""
    expressed_types: set[str] = field(default_factory=set)
    all_types: Counter[str] = field(default_factory=Counter)
    num_records: int = 0

    @property
    def num_expressed(self) -> int:
        return self.num_records - len(self.refused)

    def add(self, record: dict[str, Any], truth: dict[str, int], predict: Prediction) -> None:
        """Compare one record; a refusal counts as one, anything else that is raised is a bug."""
        self.num_records += 1
        kind = record.get("model_type", "")
        self.all_types[kind] += 1
        try:
            predicted = predict(record)
        except MemplanError as error:
            self.refused[record["id"]] = f"{kind}: {error}"
            return
        self.expressed_types.add(kind)
        for name, value in predicted.items():
            if name in truth:
                error = abs(value - truth[name]) / max(truth[name], 1)
                self.errors.setdefault(name, []).append((error, record["id"]))
                self.compared.setdefault(name, []).append((truth[name], value))

    def quantile(self, name: str, share: float) -> float:
        """The error that this share of the expressed records does not exceed."""
        ordered = sorted(error for error, _ in self.errors[name])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def quantile_of_all(self, name: str, share: float) -> float:
        """The same over all records, a refusal counting as infinitely wrong."""
        ordered = sorted(error for error, _ in self.errors[name])
        ordered += [float("inf")] * len(self.refused)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def num_within(self, name: str, error: float) -> int:
        """How many records are at most so far off."""
        return sum(each <= error for each, _ in self.errors[name])

    def worst(self, name: str) -> tuple[float, str]:
        """The largest error, and whose."""
        return max(self.errors[name])

    def table(self) -> str:
        """Everything, for the test's output."""
        head = (
            f"{self.num_expressed} of {self.num_records} records, "
            f"{len(self.expressed_types)} of {len(self.all_types)} model types"
        )
        columns = f"{'figure':24s} {'median':>9s} {'p95':>9s} {'worst':>9s} {'p95 of all':>10s}"
        lines = [head, columns]
        for name in self.errors:
            worst, where = self.worst(name)
            lines.append(
                f"{name:24s} {self.quantile(name, 0.5):9.3%} {self.quantile(name, 0.95):9.3%} "
                f"{worst:9.3%} {self.quantile_of_all(name, 0.95):10.3%}  {where}"
            )
        lines += [f"refused {name}: {why}" for name, why in sorted(self.refused.items())]
        return "\n".join(lines)

    def points(self, name: str) -> Points:
        """Every record's figure, as the accuracy page draws it."""
        return points_of(self.compared[name])

    def row(self, name: str, *, num_apart: int = 0) -> dict[str, Any]:
        """What the README shows of one figure; ``num_apart`` records are not held against it."""
        return {
            "records": self.num_expressed,
            "of": self.num_records + num_apart,
            "median": round(self.quantile(name, 0.5), 5),
            "p95": round(self.quantile(name, 0.95), 5),
            "worst": round(self.worst(name)[0], 5),
        }


def read_records(path: Path) -> Iterable[dict[str, Any]]:
    """One record a line."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def compared_with_own(path: Path, drawn: str, predict: Prediction) -> Comparison:
    """Records of a file of ours that were ``drawn`` so: to look at (``fit``), or afterwards (``fresh``)."""
    found = Comparison()
    for record in json.loads(path.read_text(encoding="utf-8")):
        if record["drawn"] == drawn:
            found.add(record, record["bytes"], predict)
    return found


def check(found: Comparison, bars: dict[str, tuple[float, float]]) -> None:
    """All is expressed, and 95th percentile and worst of each figure are within its bars."""
    assert not found.refused
    for figure, (p95, worst) in bars.items():
        assert found.quantile(figure, 0.95) <= p95, figure
        assert found.worst(figure)[0] <= worst, found.worst(figure)


def points_of(pairs: Iterable[tuple[int, int]]) -> Points:
    """Measured and predicted bytes as points; three digits of the size are enough for a picture."""
    return sorted(
        [float(f"{true / MIB:.3g}"), round(predicted / true - 1, 5)]
        for true, predicted in pairs
        if true
    )


def remember(
    section: str,
    rows: dict[str, dict[str, Any]],
    *,
    update: bool,
    points: Points | None = None,
    found: Iterable[Comparison] = (),
) -> None:
    """Check a section of the figures against those committed, or rewrite it: the ``points`` of its peak, and the
    bytes by which what was ``found`` is off.
    """
    _keep(FIGURES_FILE, section, rows, update=update)
    compared = list(found)
    if compared:
        remember_off(section, *compared, update=update)
    if points is not None:
        _keep(POINTS_FILE, section, points, update=update)


def remember_off(section: str, *found: Comparison, update: bool) -> None:
    """The same of every figure: how many records are met to the byte, and how far off the others are together."""
    off: dict[str, list[int]] = {}
    for each in found:
        for name, pairs in each.compared.items():
            off.setdefault(name, []).extend(round(abs(value - true)) for true, value in pairs)
    rows = [
        {"figure": name, "records": len(each), "exact": each.count(0), "off_bytes": sum(each)}
        for name, each in sorted(off.items())
    ]
    _keep(OFF_FILE, section, rows, update=update)


def remember_parted(found: dict[str, int], *, update: bool) -> None:
    """How many events of recorded steps stand elsewhere: none may become more; ``make accuracy`` writes what became less."""
    if update:
        _keep(EVENTS_FILE, "parted", found, update=True)
    known: dict[str, int] = json.loads(EVENTS_FILE.read_text(encoding="utf-8"))["parted"]
    assert known.keys() == found.keys()
    assert {each: size for each, size in found.items() if size > known[each]} == {}
    assert sum(known.values()) <= 2 * sum(found.values()), f"{EVENTS_FILE.name} is idle"


def remember_published(collection: str, rows: list[dict[str, Any]], *, update: bool) -> None:
    """The same of published measurements, one by one."""
    _keep(PUBLISHED_FILE, collection, rows, update=update)


def remember_wrong(collection: str, rows: list[dict[str, Any]], *, update: bool) -> None:
    """The same of verdicts that were wrong, one by one."""
    _keep(WRONG_FILE, collection, rows, update=update)


def remember_outcomes(collection: str, rows: dict[str, Any], *, update: bool) -> None:
    """The same of how runs ended, by kind of job and verdict."""
    _keep(OUTCOMES_FILE, collection, rows, update=update)


def remember_times(found: dict[str, Any], *, update: bool) -> None:
    """The same of step times that others published, by source and by kind of job."""
    _keep(TIMES_FILE, "groups", found, update=update)


def _keep(file: Path, section: str, found: Any, *, update: bool) -> None:
    if update:
        with _alone_with(file):
            kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            kept[section] = found
            file.write_text(_text_of(kept), encoding="utf-8")
        return
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept.get(section) == found, (
        f"{file.name}, from which the accuracy page is made, is out of date: run `make accuracy`"
    )


@contextmanager
def _alone_with(file: Path) -> Iterator[None]:
    """Processes of one run rewrite a file one after another."""
    import fcntl

    with (Path(gettempdir()) / f"memplan-{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _text_of(kept: dict[str, Any]) -> str:
    """Figures indented, rows one a line, points in one."""
    parts = []
    for section, found in sorted(kept.items()):
        if isinstance(found, list) and found and isinstance(found[0], list):
            parts.append(f" {json.dumps(section)}: {json.dumps(found, separators=(',', ':'))}")
        elif isinstance(found, list):
            lines = ",\n".join(f"  {json.dumps(row, sort_keys=True)}" for row in found)
            parts.append(f" {json.dumps(section)}: [\n{lines}\n ]")
        else:
            text = json.dumps(found, indent=1, sort_keys=True).replace("\n", "\n ")
            parts.append(f" {json.dumps(section)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
