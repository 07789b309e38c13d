"""The accuracy page and README's figures, written from what the tests measured.

Everything is read from ``tests/data/accuracy*.json``, which ``make accuracy`` rewrites. ``site_hooks``
fills the page's places with ``part(NAME)``, README's generated block calls ``headline`` and ``engines``.
A release keeps its figures: ``python docs/accuracy_page.py keep VERSION``.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "tests" / "data"
GIB, MIB_PER_GIB = 1 << 30, 1024
TIMES = ("published throughput", "step time")
"""Sections of seconds."""
NOT_SECTIONS = (
    *TIMES, "parameter counts", "measured on GPUs", "published measurements", "calculators", "verdicts",
)  # fmt: skip
"""Beginnings of sections whose rows are no comparison of bytes."""
MEASURED = ("H100, measured", "H200, measured", "Megatron-Kwai, measured")
"""Sections of real GPUs; all others are the real code on a card that is not there."""
UNSEEN = {
    "Context parallel": "drawn when the mechanism was there (`drawn`: fresh in tests/data/context_parallel.json)",
    "Expert and context parallel": "drawn once, nothing was looked at (tests/data/expert_parallel.json)",
    "Expert and pipeline parallel": "drawn once, nothing was looked at (tests/data/expert_parallel.json)",
    "Expert and tensor parallel": "drawn once, nothing was looked at (tests/data/expert_parallel.json)",
    "Expert parallel": "drawn when the mechanism was there (`drawn`: fresh in tests/data/expert_parallel.json)",
    "H200, measured": "a second card, to which nothing was fitted (tests/measured/test_cards.py)",
    "Networks and losses in tiles": "drawn when the mechanism was there (`drawn`: fresh in tests/data/tiled.json)",
}
"""Beginnings of sections against whose records nothing was mended, and who says so. All others count as seen: a figure that
was off there was looked into, so that what is left says how much is understood, not what a new job may expect."""
METHODS = {
    "rule of thumb": "16 bytes a parameter over ZeRO's stages",
    "rule and textbook": "the same with the textbook's activations",
    "16 bytes a parameter": "16 bytes a parameter, one GPU or DDP",
    "DeepSpeed, current": "DeepSpeed's estimator, ZeRO-2",
    "DeepSpeed": "DeepSpeed's estimator, ZeRO-3",
}
"""Others' published ways to a figure: memplan's name for the method -> what it is."""
JOBS = {
    "H100": "steps on an H100, one GPU and FSDP2",
    "published": "published runs on others' GPUs",
    "DeepSpeed": "DeepSpeed's own engine, ZeRO 0-3",
}
PEAKS = (
    "peak", "requested_peak", "peak_fwd_bwd", "max_memory_allocated", "peak, fake tensors",
    "peak, one GPU", "peak, DDP", "peak, FSDP1", "peak, FSDP2", "peak, DeepSpeed ZeRO 1-3",
    "peak, DeepSpeed ZeRO 2-3",
    "reserved, one GPU", "reserved, DDP", "reserved, FSDP1", "reserved, FSDP2", "reserved, DeepSpeed ZeRO 1-3", "reserved",
)  # fmt: skip
"""The figures of a section that decide whether a job runs."""
WORST_SHOWN = 20


def read(name: str) -> dict[str, Any]:
    """One of the data files."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def percent(value: float) -> str:
    """A share as tables print it."""
    if abs(value) < 0.00001:
        return "< 0.001 %"
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def signed(value: float) -> str:
    """An error with its direction."""
    return f"{100 * value:+.2f} %"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; all columns but the first to the right."""
    names = list(head)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- figures -----------------------------------------------------------------------------------------


def headline() -> str:
    """Three figures: a real card, what others published, and other calculators on the same jobs."""
    figures = read("accuracy")
    card = figures["H100, measured"]["max_memory_allocated"]
    reserved = figures["H100, measured"]["reserved"]
    other = figures["H200, measured"]["max_memory_allocated"]
    own = figures["published measurements, own file"]["max_allocated"]
    verdicts = figures["verdicts on the H100"]["all"]
    others = [row["median"] for row in figures["calculators, H100"].values()]
    return "\n".join(
        (
            (
                f"* **{percent(card['median'])}**: how far the peak is off at the median of {card['records']} training steps measured on an "
                f"H100 (95 % of them within {percent(card['p95'])}; what the allocator reserves {percent(reserved['median'])} and "
                f"{percent(reserved['p95'])}), {percent(other['median'])} of {other['records']} on an H200, to which nothing "
                f"was fitted (95 % within {percent(other['p95'])}). Of {verdicts['runs']} runs on the H100, {verdicts['died']} of which died, {verdicts['right']} were "
                "called right."
            ),
            (
                f"* **{percent(own['median'])}**: the same for {own['expressible']} runs that others measured and published, as their sources "
                f"state them (90 % within {percent(own['p90'])})."
            ),
            f"* **{percent(min(others))} to {percent(max(others))}**: the published formulas on those steps on the H100, at the median.",
        )
    )


def sections() -> dict[str, dict[str, Any]]:
    """Every section of the table, by its name."""
    return {
        name: rows
        for name, rows in sorted(read("accuracy").items())
        if not name.startswith(NOT_SECTIONS) and all("p95" in row for row in rows.values())
    }


def unseen(*, is_whole: bool = False) -> str:
    """What nothing was mended against: peaks and reserved, or every figure."""
    chosen = {name: rows for name, rows in sections().items() if name.startswith(tuple(UNSEEN))}
    return table(COMPARED, compared(chosen, is_whole=is_whole))


def seen(*, is_whole: bool = False) -> str:
    """Everything else, parameter counts first."""
    chosen = {name: rows for name, rows in sections().items() if not name.startswith(tuple(UNSEEN))}
    counts = read("accuracy")["parameter counts"]["total, base model, largest layer"]
    first = (
        "parameter counts", "total, base, largest layer, active",
        f"{counts['exact']} of {counts['records']}", "exact", "exact", "exact",
    )  # fmt: skip
    text = (
        f"\n\nOf transformers' {counts['types']} model types there, {counts['exact_types']} are counted to the integer, "
        f"{counts['types_off']} are off and {counts['types_unsupported']} is refused by name."
    )
    rows = [first, *compared(chosen, is_whole=is_whole)]
    return table(COMPARED, rows) + (text if is_whole else "")


COMPARED = ("compared", "figure", "records", "median error", "95th percentile", "worst")
"""Columns of both."""


def compared(
    chosen: dict[str, dict[str, Any]], *, is_whole: bool
) -> list[tuple[str, str, str, str, str, str]]:
    """How often each was compared, and how far off it was."""
    rows = []
    for section, found in chosen.items():
        for name, row in found.items():
            if is_whole or name in PEAKS or name.startswith("least"):
                median, p95, worst = (percent(row[key]) for key in ("median", "p95", "worst"))
                count = f"{row['records']} of {row['of']}"
                rows.append((section, name.replace("_", " "), count, median, p95, worst))
    return rows


def why_unseen() -> str:
    """Who says of each that it is."""
    return "\n".join(f"* {name}: {why}." for name, why in UNSEEN.items())


def first_seen() -> str:
    """Runs that were drawn afresh, as they were before anything was mended against them."""
    rows = (
        (row["drawn"], str(row["runs"]), row["figure"], row["to"], row["but"] or "-")
        for row in read("first_seen")["draws"]
    )
    return table(("drawn", "runs", "figure", "within", "but for"), rows)


CHOSEN = (
    ("parameter counts", ""), ("one GPU", "peak"), ("DeepSpeed ZeRO 0-3", "peak"), ("FSDP2", "peak"),
    ("H100, measured", "max memory allocated"), ("H100, measured", "reserved"),
)  # fmt: skip
"""What README shows: a section, and the figure where it has several."""


def chosen_engines() -> str:
    """Six rows of ``seen``. Ends the process where one is gone."""
    lines = seen().splitlines()
    rows = []
    for section, figure in CHOSEN:
        start = f"| {section} | {figure}"
        found = [line for line in lines if line.startswith(start)]
        if not found:
            msg = f"the accuracy table has no row {section!r}, {figure!r}"
            raise SystemExit(msg)
        rows.append(found[0])
    return "\n".join([*lines[:2], *rows])


def calculators() -> str:
    """The same jobs by other calculators' published formulas."""
    figures = read("accuracy")
    own = {
        "H100": figures["H100, measured"]["max_memory_allocated"],
        "DeepSpeed": figures["DeepSpeed ZeRO 0-3"]["peak"],
    }
    published = figures["published measurements, own file"]["max_allocated"]
    rows = []
    for name, jobs in JOBS.items():
        found = own.get(name, {"p95": published["p90"], **published})
        count = str(found.get("records") if name in own else found["expressible"])
        rows.append((f"**memplan**: {jobs}", count, f"**{percent(found['median'])}**",
                     f"**{percent(found['p95'])}**", ""))  # fmt: skip
        for method, row in figures[f"calculators, {name}"].items():
            low = f"{row['too_low']} of {row['jobs']}"
            cells = (percent(row["median"]), percent(row["p90"]), low)
            rows.append((METHODS[method], str(row["jobs"]), *cells))
    return table(
        ("who, and of which jobs", "jobs", "median error", "90th percentile", "too low"), rows
    )


def times() -> str:
    """Predicted beside published or measured throughput and step times."""
    figures = read("accuracy")
    rows = []
    for section in TIMES:
        for name, row in figures[section].items():
            cells = (percent(row[key]) for key in ("median", "p95", "worst"))
            rows.append((f"{section}: {name}", f"{row['records']} of {row['of']}", *cells))
    return table(("compared", "records", "median error", "95th percentile", "worst"), rows)


def published_times() -> str:
    """Step times that others published, source by source and by kind of job, the half that figures may be taken from apart."""
    head = (
        "source or kind of job",
        "half",
        "steps",
        "median",
        "90th percentile",
        "within 30 %",
        "in the range",
    )
    rows = (
        (
            name, half, str(each["steps"]), percent(each["median"]), percent(each["p90"]),
            f"{each['near']:.0%}".replace("%", " %"), f"{each['inside']:.0%}".replace("%", " %"),
        )
        for name, halves in read("published_times")["groups"].items()
        for half, each in halves.items()
    )  # fmt: skip
    return table(head, rows)


def versions() -> str:
    """The peaks of each release's sections, and of what is not released yet."""
    kept = read("accuracy_history") | {"unreleased": peaks_now()}
    names = sorted({section for found in kept.values() for section in found})
    rows = []
    for name in names:
        cells = []
        for found in kept.values():
            row = found.get(name)
            cells.append(f"{percent(row['p95'])} of {row['records']}" if row else "-")
        rows.append((name, *cells))
    return table(("95th percentile of the peak", *kept), rows)


def peaks_now() -> dict[str, dict[str, Any]]:
    """Each section's peak, as the history keeps it."""
    found = {}
    for section, rows in sections().items():
        name = next((each for each in PEAKS if each in rows), None)
        if name is not None:
            found[section] = {key: rows[name][key] for key in ("records", "median", "p95", "worst")}
    return found


# -- published measurements --------------------------------------------------------------------------


def published_rows() -> list[dict[str, Any]]:
    """Every published measurement once; a run in two collections is one."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for rows in read("accuracy_published").values():
        for row in rows:
            found.setdefault((row["id"], row["what"]), row)
    return list(found.values())


def error_of(row: dict[str, Any], key: str = "predicted_bytes") -> float:
    """Predicted over measured, less one."""
    error: float = row[key] / row["measured_bytes"] - 1
    return error


def published() -> str:
    """Rows by source, each source folded; settings that were inferred are marked and shown both ways."""
    by_source = defaultdict(list)
    for row in published_rows():
        by_source[source_of(row)].append(row)
    parts = []
    for source, rows in sorted(by_source.items()):
        sizes = sorted(abs(error_of(row)) for row in rows)
        middle, most = percent(sizes[len(sizes) // 2]), percent(sizes[-1])
        summary = f"{escape(source)}: {len(rows)} figures, median error {middle}, worst {most}"
        cells = table(
            ("run", "GPU", "counted", "measured GiB", "memplan GiB", "error"),
            map(published_cells, sorted(rows, key=lambda row: (row["what"], row["id"]))),
        )
        parts.append(f"<details markdown><summary>{summary}</summary>\n\n{cells}\n\n</details>")
    return "\n\n".join(parts)


def published_summary() -> str:
    """How many there are, how many a setup says, and how far off memplan is."""
    figures = read("accuracy")
    everything = figures["published measurements"]["all"]
    peaks, segments = (
        figures["published measurements"][f"max_{kind}"] for kind in ("allocated", "reserved")
    )
    own = figures["published measurements, own file"]["max_allocated"]
    chosen, ranges_ = (
        figures["measured on GPUs"]["allocated"],
        figures["measured on GPUs"]["reserved"],
    )
    return (
        f"{everything['records']} published measurements of one GPU, DDP, FSDP and ZeRO, translated by machine from what their sources "
        f"state and never from a measured byte: {everything['expressible']} are expressible as a setup ({everything['unstated']} of the "
        f"others leave out what anybody would need). Allocated peaks, {peaks['expressible']} of {peaks['records']}: median error "
        f"{percent(peaks['median'])}, 90th percentile {percent(peaks['p90'])}; reserved, {segments['expressible']} of "
        f"{segments['records']}: {percent(segments['median'])} and {percent(segments['p90'])}. With all of fms-acceleration's runs the "
        f"allocated peaks are {own['records']}, of which {own['expressible']} are expressible: {percent(own['median'])} and "
        f"{percent(own['p90'])}.\n\nOf {ranges_['expressible']} expressible reserved figures in `tests/measured/published.yaml` "
        f"{ranges_['inside']} lie in memplan's range, from what the run needs to what it reserves with room, with the context of either "
        f"end; {ranges_['near']} of all {ranges_['records']} are within 8 % of the replayed run, {ranges_['close']} within 3 %. Its "
        f"{chosen['records']} allocated figures are of the worst specified sources: off by {percent(chosen['least_as_stated'])} to "
        f"{percent(chosen['worst_as_stated'])} as stated, and explained to {percent(chosen['worst'])} by settings inferred afterwards. None "
        f"of {ranges_['died']} published runs that died is said to fit."
    )


def source_of(row: dict[str, Any]) -> str:
    """The project that published it."""
    words = row["source"].replace("github ", "").split(",")[0].split(" ")[0]
    return "/".join(words.strip("/").split("/")[:2])


def published_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of that table."""
    run = f"{row['id']}<br>{row['run']}"
    error = signed(error_of(row))
    if "inferred" in row:
        stated = signed(error_of(row, "as_stated_bytes"))
        error = f"{error} (as stated: {stated})"
        run += f"<br>*inferred: {row['inferred']}*"
    if "why" in row:
        run += f"<br>{row['why']}"
    sizes = (f"{row[key] / GIB:.2f}" for key in ("measured_bytes", "predicted_bytes"))
    return (run.replace("|", "/").replace("\n", " "), row["gpu"], row["what"], *sizes, error)


def worst() -> str:
    """The published figures that are furthest off, with what is known of why."""
    rows = sorted(published_rows(), key=lambda row: -abs(error_of(row)))[:WORST_SHOWN]
    cells = []
    for row in rows:
        why = row.get("why") or "not known"
        sizes = (f"{row[key] / GIB:.2f}" for key in ("measured_bytes", "predicted_bytes"))
        cells.append(
            (row["id"], row["what"], *sizes, signed(error_of(row)), why.replace("\n", " "))
        )
    return table(("record", "counted", "measured GiB", "memplan GiB", "error", "why"), cells)


# -- verdicts ----------------------------------------------------------------------------------------

VERDICTS = "verdicts, "
"""How sections of ran and died by verdict begin."""


def verdicts() -> str:
    """Said beside what became of the runs: a row for each collection, and all of them together."""
    found = {
        name.removeprefix(VERDICTS): rows
        for name, rows in sorted(read("accuracy").items())
        if name.startswith(VERDICTS)
    }
    ends = [
        ("fits", "ran"),
        ("fits", "died"),
        ("tight", "ran"),
        ("tight", "died"),
        ("OOM", "ran"),
        ("OOM", "died"),
    ]
    counts = {
        name: [rows.get(verdict, {}).get(end, 0) for verdict, end in ends]
        for name, rows in found.items()
    }
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    head = ("runs", *(f"{verdict}, {end}" for verdict, end in ends))
    rows = [(name, *(str(each) if each else "-" for each in row)) for name, row in counts.items()]
    fits, false_fits, *_, false_ooms, _ = counts["all"]
    died = sum(counts["all"][1::2])
    text = (
        f"\n\nOf {died} runs that died {false_fits} were said to fit, of {sum(counts['all'][::2])} that completed "
        f"{false_ooms} to run out of memory; {fits} of those said to fit ran."
    )
    return table(head, rows) + text


def wrong_verdicts() -> str:
    """Each run that was judged wrongly, once, with what may have made the difference."""
    rows = {row["id"]: row for found in read("accuracy_verdicts").values() for row in found}
    if not rows:
        return "None."
    cells = []
    for name, row in sorted(rows.items()):
        needs = f"{row['low_bytes'] / GIB:.1f}-{row['high_bytes'] / GIB:.1f} of {row['capacity_bytes'] / GIB:.1f}"
        run = f"{name}<br>{row['run']}, {row['gpu']}".replace("|", "/")
        cells.append((run, f"{row['verdict']}, {row['ended']}", needs, row["why"]))
    return table(("run", "said, became", "GiB needed", "a guess why"), cells)


# -- pictures ----------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 70, 28, 12, 40
STYLE = (
    "<style>.chart{width:100%;height:auto;font:12px system-ui,sans-serif}.chart text{fill:currentColor}"
    ".chart .grid{stroke:currentColor;opacity:.15}.chart .same{stroke:currentColor;opacity:.5}"
    ".chart .card{fill:#d1495b;stroke:#d1495b}.chart .code{fill:#2b7de9;stroke:#2b7de9}"
    ".chart .others{fill:#e09f1f;stroke:#e09f1f}.chart circle{stroke:none;fill-opacity:.45}</style>"
)


def svg(width: int, height: int, title: str, body: str) -> str:
    """A drawing that takes the page's colours."""
    return (
        f'{STYLE}<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )


def predicted_against_measured() -> str:
    """Every record as a point, both axes logarithmic: on the line memplan is right."""
    groups = point_groups()
    most = max(true for _, points in groups for true, _ in points)
    height, low, high = 520, math.log10(0.01), math.log10(1.5 * most)

    def at(gib: float) -> float:
        return (math.log10(gib) - low) / (high - low)

    def x(gib: float) -> float:
        return LEFT + at(gib) * (WIDTH - LEFT - RIGHT)

    def y(gib: float) -> float:
        return height - BOTTOM - at(gib) * (height - BOTTOM - TOP)

    body = []
    for tick in (10.0**power for power in range(-2, int(high) + 1)):
        body.append(f'<path class="grid" d="M{x(tick):.0f} {TOP}V{height - BOTTOM}"/>')
        body.append(f'<path class="grid" d="M{LEFT} {y(tick):.0f}H{WIDTH - RIGHT}"/>')
        body.append(
            f'<text x="{x(tick):.0f}" y="{height - 22}" text-anchor="middle">{tick:,g}</text>'
        )
        body.append(
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.0f}" text-anchor="end">{tick:,g}</text>'
        )
    body.append(
        f'<path class="same" d="M{x(0.01):.0f} {y(0.01):.0f}L{x(most):.0f} {y(most):.0f}"/>'
        f'<text x="{WIDTH / 2:.0f}" y="{height - 4}" text-anchor="middle">measured GiB</text>'
        f'<text x="14" y="{height / 2:.0f}" text-anchor="middle" transform="rotate(-90 14 {height / 2:.0f})">memplan GiB</text>'
    )
    count = 0
    for kind, points in groups:
        for true, error in points:
            if true > 0.01:
                body.append(
                    f'<circle class="{kind}" cx="{x(true):.1f}" cy="{y(true * (1 + error)):.1f}" r="2.6"/>'
                )
                count += 1
    words = (
        ("card", "allocated, measured on GPUs"),
        ("code", "allocated, the real code on a card that is not there"),
        ("others", "reserved, published: sources seldom say how full the card was"),
    )
    for line, (kind, text) in enumerate(words):
        body.append(
            f'<circle class="{kind}" cx="{LEFT + 20}" cy="{TOP + 16 + 18 * line}" r="4"/>'
            f'<text x="{LEFT + 30}" y="{TOP + 20 + 18 * line}">{text}</text>'
        )
    title = f"Peaks of {count} records, measured and predicted, on logarithmic axes"
    return svg(WIDTH, height, title, "".join(body))


def point_groups() -> list[tuple[str, list[list[float]]]]:
    """Points [GiB, error], the surest above the others."""
    sections = read("accuracy_points")

    def of(is_card: bool) -> list[list[float]]:
        chosen = (rows for name, rows in sections.items() if (name in MEASURED) is is_card)
        return [[mib / MIB_PER_GIB, error] for mib, error in chain.from_iterable(chosen)]

    def of_published(what: str) -> list[list[float]]:
        rows = (row for row in published_rows() if row["what"] == what)
        return [[row["measured_bytes"] / GIB, error_of(row)] for row in rows]

    return [
        ("others", of_published("reserved")),
        ("code", of(is_card=False)),
        ("card", of(is_card=True) + of_published("allocated")),
    ]


def error_by_engine() -> str:
    """For each section a line from the median error to the worst, logarithmic; other formulas below."""
    rows: list[tuple[str, str, float, float, float]] = []
    for name, row in peaks_now().items():
        kind = "card" if name in MEASURED else "code"
        rows.append((name, kind, row["median"], row["p95"], row["worst"]))
    own = read("accuracy")["published measurements, own file"]["max_allocated"]
    sizes = sorted(abs(error_of(row)) for row in published_rows() if row["what"] == "allocated")
    rows.append(("published, allocated", "card", own["median"], own["p90"], sizes[-1]))
    for method, row in read("accuracy")["calculators, H100"].items():
        rows.append((f"on the H100: {method}", "others", row["median"], row["p90"], row["worst"]))
    return ranges(rows, "Error of the peak: median (dot), 95th percentile (line), worst (tick)")


def ranges(rows: list[tuple[str, str, float, float, float]], title: str) -> str:
    """A row each: dot, line and tick on one logarithmic axis of per cent."""
    left, step = 230, 20
    height = TOP + step * len(rows) + BOTTOM
    low, high = -5.0, 1.0

    def x(share: float) -> float:
        place = (math.log10(max(share, 1e-5)) - low) / (high - low)
        return left + max(0.0, min(1.0, place)) * (WIDTH - left - RIGHT)

    body = []
    for power in range(-5, 2):
        words = "<= 0.001 %" if power == -5 else f"{100 * 10.0**power:g} %"
        body.append(
            f'<path class="grid" d="M{x(10.0**power):.0f} {TOP}V{height - BOTTOM}"/>'
            f'<text x="{x(10.0**power):.0f}" y="{height - 22}" text-anchor="middle">{words}</text>'
        )
    for line, (name, kind, median, most, furthest) in enumerate(rows):
        y = TOP + step * line + step / 2
        body.append(
            f'<g class="{kind}"><text x="{left - 10}" y="{y + 4:.0f}" text-anchor="end" stroke="none">{escape(name)}</text>'
            f'<path d="M{x(median):.1f} {y:.0f}H{x(most):.1f}" stroke-width="3" fill="none"/>'
            f'<path d="M{x(furthest):.1f} {y - 5:.0f}v10" stroke-width="1.5" fill="none"/>'
            f'<ellipse cx="{x(median):.1f}" cy="{y:.0f}" rx="4" ry="4"/></g>'
        )
    return svg(WIDTH, height, title, "".join(body))


PARTS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "unseen": lambda: unseen(is_whole=True),
    "why unseen": why_unseen,
    "first seen": first_seen,
    "seen": lambda: seen(is_whole=True),
    "calculators": calculators,
    "times": times,
    "published times": published_times,
    "versions": versions,
    "published summary": published_summary,
    "published": published,
    "verdicts": verdicts,
    "wrong verdicts": wrong_verdicts,
    "worst": worst,
    "predicted against measured": predicted_against_measured,
    "error by engine": error_by_engine,
}


def part(name: str) -> str:
    """What stands at ``{{ accuracy: NAME }}`` or ``{% drawing: NAME %}``."""
    return PARTS[name]()


def keep(version: str) -> None:
    """Write the present figures into the history as a release's."""
    kept = read("accuracy_history") | {version: peaks_now()}
    text = json.dumps(kept, indent=1)
    (DATA / "accuracy_history.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] != ["keep"] or len(sys.argv) != 3:
        sys.exit("python docs/accuracy_page.py keep VERSION")
    keep(sys.argv[2])
