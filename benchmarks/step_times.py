"""Step times that others measured and published, beside memplan's: by source, by kind of job, by half.

``python benchmarks/step_times.py`` says every row of ``throughput.jsonl`` (``MEMPLAN_REFERENCE``, by default
``../shared/reference`` beside the checkout) as its ``say`` says it, and prints how far memplan is off. A row belongs
to the fitted or to the unfitted half by a hash of its id: constants may be fitted to the first alone.
Time is asked alone: no memory is replayed. ``--save FILE`` writes what came of each row, ``--beside FILE`` prints an
earlier answer beside this one, ``--measured`` scales each family by each of its rows, ``--only TEXT`` looks at the sources or kinds whose name has it, ``--rows`` prints each
row of the fitted half, ``--all-rows`` of both.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import memplan
from memplan.errors import MemplanError
from memplan.estimator.job import Job
from memplan.estimator.time.site import Site
from memplan.estimator.time.step_time import StepTime, calibrated, time_of

ROOT = Path(__file__).parent.parent
REFERENCE = Path(os.environ.get("MEMPLAN_REFERENCE", ROOT.parent / "shared" / "reference"))
ROWS = REFERENCE / "throughput.jsonl"
NEAR = 0.30
ORDERED = 0.10
"""Two setups that differ by more have an order."""
SHORT = 1024
"""Tokens of a micro-batch up to which its launches may decide."""
LARGE = 256
"""GPUs from which a network is large."""


class Row(NamedTuple):
    """A published row, and what memplan says."""

    id: int
    source: str
    family: str
    """Rows of one source, model and card."""
    kinds: tuple[str, ...]
    is_fitted: bool
    tokens: float
    """Of a step, for each GPU."""
    measured_s: float
    low_s: float
    expected_s: float
    high_s: float
    shares: Mapping[str, float]
    seconds: float
    """Of this CPU, to say it."""
    words: str

    @property
    def error(self) -> float:
        """Of the rate: above nought memplan is too fast."""
        return self.measured_s / self.expected_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the printed range."""
        return self.low_s <= self.measured_s <= self.high_s


KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "well stated": lambda row: "inferred" not in row,
    "launch-bound": lambda row: _tokens(row) <= SHORT,
    "offload": lambda row: any(
        row["say"].get(f"offload_{each}", "none") != "none" for each in ("optimizer", "param")
    ),
    "virtual stages": lambda row: row["say"].get("virtual_stages", 1) > 1,
    "large networks": lambda row: row["say"]["num_gpus"] >= LARGE,
    "unmeasured cards": lambda row: row["gpu"] in ("b200", "gb200", "a800-sxm4-80gb"),
    "none of these": lambda row: (
        not any(KINDS[each](row) for each in KINDS if each not in ("well stated", "none of these"))
    ),
}


def _tokens(row: Mapping[str, Any]) -> int:
    say = row["say"]
    return int(say["seq_len"] * say["micro_batch_size"] // say.get("context_parallel", 1))


def is_fitted(row_id: int) -> bool:
    """Whether constants may be fitted to a row: half of them, for good."""
    return sha256(f"throughput row {row_id}".encode()).digest()[0] % 2 == 0


def published_rows(path: Path = ROWS) -> Iterator[Mapping[str, Any]]:
    """Those that can be said."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "say" in row:
                yield row


def job_of(row: Mapping[str, Any]) -> Job:
    """A row's job; raises a ``MemplanError`` where it is refused."""
    say = dict(row["say"])
    if "adapter" in say:
        say["adapter"] = memplan.Lora(
            **{
                key: tuple(each) if isinstance(each, list) else each
                for key, each in say["adapter"].items()
            }
        )
    model = memplan.load_model(row.get("config") or row["model"])
    return Job.of(model, memplan.TrainingSetup(**say), memplan.load_gpu(row["gpu"]))


def time_of_row(row: Mapping[str, Any]) -> StepTime:
    """A step of a row; raises a ``MemplanError`` where it is refused."""
    return time_of(job_of(row), site=site_of(row))


def site_of(row: Mapping[str, Any]) -> Site:
    """What a row states of its machines."""
    gbit = row.get("network_gbit")
    return Site(between_nodes=gbit * 1e9 / 8 if gbit else None)


def measured_seconds(row: Mapping[str, Any], time: StepTime) -> float:
    """Of a step, whatever the source's unit."""
    unit, measured = row["unit"], float(row["measured"])
    if unit.startswith("s/"):
        return measured
    if unit == "tokens/s/GPU":
        return time.tokens / time.num_gpus / measured
    if "sequences/s of 8 GPUs" in unit:
        return time.tokens / row["say"]["seq_len"] / measured
    msg = f"row {row['id']}: unknown unit {unit}"
    raise ValueError(msg)


def said(row: Mapping[str, Any]) -> Row:
    """A row beside memplan; raises a ``MemplanError`` where it is refused."""
    start = process_time()
    time = time_of_row(row)
    return Row(
        id=row["id"],
        source=source_of(row),
        family=family_of(row),
        kinds=tuple(name for name, holds in KINDS.items() if holds(row)),
        is_fitted=is_fitted(row["id"]),
        tokens=time.tokens / time.num_gpus,
        measured_s=measured_seconds(row, time),
        low_s=time.low_s,
        expected_s=time.expected_s,
        high_s=time.high_s,
        shares={each.words: each.seconds for each in time.shares},
        seconds=process_time() - start,
        words=words_of(row),
    )


def family_of(row: Mapping[str, Any]) -> str:
    """Rows of one source, model and card."""
    return f"{row['source']} {row['model']} {row['gpu']}"


def source_of(row: Mapping[str, Any]) -> str:
    """A source's repository and file, in short."""
    return " ".join(str(row["source"]).split(" @")[0].split()[:2])[:48]


_SHORT = {
    "num_gpus": "n", "seq_len": "s", "micro_batch_size": "b", "gradient_accumulation_steps": "ga",
    "tensor_parallel": "tp", "pipeline_parallel": "pp", "virtual_stages": "vp", "context_parallel": "cp",
    "expert_parallel": "ep", "zero_stage": "z",
}  # fmt: skip


def words_of(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    say = row["say"]
    sizes = [
        f"{word}{say[name]}" for name, word in _SHORT.items() if say.get(name, 1) != 1 or word in "nsbz"
        if name in say
    ]  # fmt: skip
    others = [
        str(say[name]) for name in ("quantize", "fp8", "checkpointing") if say.get(name, "none") != "none"
    ]  # fmt: skip
    if "adapter" in say:
        others.append("lora+" if say["adapter"].get("modules_to_save") else "lora")
    if say.get("offload_optimizer", "none") != "none":
        others.append(f"off:{say['offload_param']}")
    return f"{row['model']} {row['gpu']} {say['engine'][:4]} " + " ".join(sizes + others)


# -- what is printed -------------------------------------------------------------------------------


class Figures(NamedTuple):
    """How far some rows are off."""

    count: int
    median: float
    p90: float
    signed: float
    """The median with its sign."""
    near: float
    """Within 30 %."""
    inside: float
    """Within the printed range."""


def figures(rows: Sequence[Row]) -> Figures | None:
    """None of none."""
    if not rows:
        return None
    errors = sorted(abs(each.error) for each in rows)
    return Figures(
        len(rows),
        median(errors),
        errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        median(each.error for each in rows),
        sum(each <= NEAR for each in errors) / len(errors),
        sum(each.is_inside for each in rows) / len(rows),
    )


def order(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of one source whose tokens per second and GPU differ by more than a tenth, and of how many the order is right."""
    pairs = right = 0
    for one, other in combinations(rows, 2):
        faster = other.measured_s * one.tokens / (one.measured_s * other.tokens)
        if one.source == other.source and abs(faster - 1) > ORDERED:
            pairs += 1
            right += (faster > 1) == (other.expected_s * one.tokens > one.expected_s * other.tokens)
    return pairs, right


class Scaled(NamedTuple):
    """What is said of a row where another of its family was measured."""

    error: float
    is_inside: bool
    is_stated: bool
    """Nothing of either row was inferred."""


def by_one_measured(rows: Sequence[Mapping[str, Any]]) -> list[Scaled]:
    """A family's other rows where one of it was measured (``calibrated``), the nearest first."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(family_of(row), []).append(row)
    found: list[Scaled] = []
    for own in families.values():
        for first in own if len(own) > 1 else ():
            site, time = site_of(first), time_of_row(first)
            calibration = calibrated(job_of(first), measured_seconds(first, time), site=site)
            for row in own:
                if row is not first:
                    there = replace(site_of(row), calibration=calibration)
                    said = time_of(job_of(row), site=there)
                    seconds = measured_seconds(row, said)
                    found.append(
                        Scaled(
                            abs(seconds / said.expected_s - 1),
                            said.low_s <= seconds <= said.high_s,
                            "inferred" not in first and "inferred" not in row,
                        )
                    )
    return sorted(found)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """All, those of each kind of job, those of each source."""
    found: dict[str, list[Row]] = {"all": list(rows)}
    for kind in KINDS:
        own = [row for row in rows if kind in row.kinds]
        if own:
            found[f"kind: {kind}"] = own
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return found


def table(rows: Sequence[Row], earlier: Mapping[int, Row]) -> Iterator[str]:
    """By source and by kind, each half apart."""
    yield f"{'':50s} {'half':8s} {'n':>4s} {'median':>7s} {'p90':>7s} {'signed':>7s} {'<=30%':>6s} {'inside':>6s}"
    for name, own in groups(rows).items():
        for half, kept in (
            ("fitted", [each for each in own if each.is_fitted]),
            ("unfitted", [each for each in own if not each.is_fitted]),
            ("both", own),
        ):
            line = _line(kept)
            if line is None:
                continue
            before = _line([earlier[each.id] for each in kept if each.id in earlier])
            yield f"{name:50s} {half:8s} {line}" + (f"   | {before}" if before else "")


def _line(rows: Sequence[Row]) -> str | None:
    found = figures(rows)
    if found is None:
        return None
    return (
        f"{found.count:4d} {found.median:7.1%} {found.p90:7.1%} {found.signed:+7.1%} {found.near:6.0%} "
        f"{found.inside:6.0%}"
    )


def single(rows: Iterable[Row]) -> Iterator[str]:
    """Row by row."""
    for row in rows:
        shares = ", ".join(
            f"{words[:22]} {seconds:.3g}"
            for words, seconds in sorted(row.shares.items(), key=lambda each: -each[1])
        )
        yield (
            f"{row.id:4d} {row.words:70s} measured {row.measured_s:7.3f} said {row.expected_s:7.3f} "
            f"({row.low_s:.3f}-{row.high_s:.3f}) {row.error:+6.1%} | {shares}"
        )


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--all-rows", action="store_true")
    parser.add_argument("--measured", action="store_true")
    asked = parser.parse_args()
    rows, kept, refused = [], [], []
    for row in published_rows():
        names = [source_of(row), *(name for name, holds in KINDS.items() if holds(row))]
        if not any(asked.only in each for each in names):
            continue
        try:
            rows.append(said(row))
            kept.append(row)
        except MemplanError as error:
            refused.append(f"{row['id']:4d} {words_of(row)} refused: {error}")
    earlier = _read(asked.beside) if asked.beside else {}
    out = sys.stdout.write
    if asked.rows or asked.all_rows:
        for line in single(each for each in rows if asked.all_rows or each.is_fitted):
            out(f"{line}\n")
    for line in (*refused, *table(rows, earlier)):
        out(f"{line}\n")
    pairs, right = order(rows)
    out(f"order: {right} of {pairs} pairs\n")
    if asked.measured:
        scaled = by_one_measured(kept)
        for words, own in (
            ("", scaled),
            (", well stated", [each for each in scaled if each.is_stated]),
        ):
            out(
                f"by one measured step of its family{words}: n {len(own)}, median {own[len(own) // 2].error:.1%}, "
                f"p90 {own[int(0.9 * len(own))].error:.1%}, in range {sum(each.is_inside for each in own) / len(own):.0%}\n"
            )
    out(f"CPU: {sum(each.seconds for each in rows):.0f} s for {len(rows)} rows\n")
    if asked.save:
        asked.save.write_text("".join(f"{json.dumps(each._asdict())}\n" for each in rows))


def _read(path: Path) -> Mapping[int, Row]:
    found = {}
    for line in path.read_text().splitlines():
        row = Row(**json.loads(line))
        found[row.id] = row._replace(kinds=tuple(row.kinds))
    return found


if __name__ == "__main__":
    main()
